"""What an optimizer keeps, found by an update without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.optimizer.kept_state import kept_bytes

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Stubborn(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                float(each.sum())  # asks for a number


def found(optimizer: torch.optim.Optimizer, **asked: bool) -> tuple[dict[int, float], list[str]]:
    usual = {"fp16": False, "bf16": False, "shard_optimizer_state": False}
    runtime: Any = SimpleNamespace(
        config=SimpleNamespace(**{**usual, **asked}),
        sharding_groups=None,
        live_optimizers=lambda: [SimpleNamespace(optimizer=optimizer)],
    )
    state_bytes, _, remarks = kept_bytes(runtime)
    return state_bytes, remarks


def real(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Returns what it keeps after an update of real parameters."""
    sizes = {}
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    optimizer.step()
    for each, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        sizes[id(each)] = float(sum(value.numel() * value.element_size() for value in tensors))
    return sizes


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters, centered=True),
    ],
    ids=["fused", "amsgrad", "momentum", "centered"],
)
def test_what_is_kept_is_what_an_update_keeps(make: Make) -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 3))
    optimizer = make(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    state_bytes, remarks = found(optimizer)
    assert not optimizer.state
    assert remarks == []
    assert state_bytes == real(optimizer)


def test_masters_count() -> None:
    parameter = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    momentum = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert found(momentum, bf16=True)[0] == {id(parameter): 64 * (4 + 4)}
    assert found(momentum)[0] == {id(parameter): 64 * 2}


def test_an_optimizer_that_needs_values_is_said() -> None:
    parameter = nn.Parameter(torch.ones(8))
    state_bytes, [remark] = found(Stubborn([parameter], lr=0.1))
    assert state_bytes == {id(parameter): 64}
    assert remark.startswith("Stubborn cannot be tried on tensors without memory")
