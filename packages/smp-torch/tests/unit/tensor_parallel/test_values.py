from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.building.delayed_parameters import DelayedParameters
from smdistributed.modelparallel.torch.tensor_parallel.values import ValuesOfFirst


@pytest.mark.parametrize(
    ("dtype", "trains"), [(torch.float32, True), (torch.complex64, True), (torch.int8, False)]
)
def test_what_has_gradients_trains(dtype: torch.dtype, trains: bool) -> None:
    module, group = nn.Linear(2, 2), cast(Any, None)  # for modules of the user's it is not asked
    values = torch.ones(2, 2).to(dtype)
    ValuesOfFirst(group, DelayedParameters()).put(module, "weight", values, None)
    assert module.weight.requires_grad is trains
    assert module.weight.dtype is dtype
