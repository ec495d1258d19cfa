"""While a model runs, what stands for a slice looks like the whole, or is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.absence.tensors import make_absent
from smdistributed.modelparallel.torch.compat.private.below import give, scripted_functions_seen
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    past_subclass_functions,
)
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    SliceGuard,
    SliceReadError,
    SliceSlot,
)

WHOLE, OWN = (4, 4), (4, 2)


class Keeper:
    """Of absent tensors, which nothing is computed with here."""

    fake_mode = FakeTensorMode()


def here() -> torch.Tensor:
    return nn.Parameter(torch.ones(OWN))


def fake() -> torch.Tensor:
    with Keeper.fake_mode:
        return nn.Parameter(torch.ones(OWN))


def absent() -> torch.Tensor:
    made = here()
    keeper: Any = Keeper()
    make_absent(made, keeper, "map.weight", made.shape, made.device)
    return made


def length(tensors: list[torch.Tensor]) -> int:
    return tensors[0].shape[1]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_length = torch.jit.script(length)


def guard_of(parameter: torch.Tensor) -> SliceGuard:
    module = nn.Module()
    module._parameters["weight"] = parameter  # type: ignore[assignment]
    return SliceGuard([SliceSlot(module, "weight", "map.weight", WHOLE, ())], {})


@pytest.mark.parametrize("make", [here, fake, absent])
def test_whoever_asks_past_all_functions_sees_the_whole(make: Any) -> None:
    parameter = make()
    with guard_of(parameter).on(), past_subclass_functions():
        assert parameter.shape == WHOLE
    with past_subclass_functions():
        assert parameter.shape == OWN
    assert type(parameter) is type(make())


def test_what_is_gathered_meanwhile_is_not_shown() -> None:
    parameter, gathered = here(), torch.zeros(OWN)
    with guard_of(parameter).on(), past_subclass_functions():
        give(parameter, gathered)
        with pytest.raises(SliceReadError):
            parameter.sum()
    assert parameter.data_ptr() == gathered.data_ptr()


@pytest.mark.parametrize("make", [here, fake, absent])
def test_a_script_is_refused_by_name_before_it_begins(make: Any) -> None:
    parameter = make()
    refused = pytest.raises(SliceReadError, match=r"length was given map\.weight while the model")
    with scripted_functions_seen(), guard_of(parameter).on(), refused:
        scripted_length([parameter])
    assert scripted_length([here()]) == OWN[1]
