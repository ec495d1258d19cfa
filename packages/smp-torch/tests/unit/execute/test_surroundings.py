"""What around a step takes part in its passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smdistributed.modelparallel.torch.execute.surroundings import takes_part


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


AROUND: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (contextlib.nullcontext, ""),
    "device": (lambda: torch.device("cpu"), ""),
    "no_grad": (torch.no_grad, ""),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same),
        "saved tensors",
    ),
    "function mode": (TorchFunctionMode, "a mode"),
    "dispatch mode": (TorchDispatchMode, "a mode"),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), "anomalies"),
    "dual level": (torch.autograd.forward_ad.dual_level, "transform"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", AROUND)
def test_what_takes_part_is_found(name: str) -> None:
    around, expected = AROUND[name]
    with around():
        found = takes_part()
    assert (expected in found) if expected else not found
