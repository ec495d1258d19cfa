"""Runs of a copy of a model, which show how its modules are called and leave nothing behind."""

from __future__ import annotations

import functools
import random
from typing import ClassVar

import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.auto.capture import Trial, calls_within

WIDTH = 4


@functools.lru_cache
def _places(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)[:, None]


class Net(nn.Module):
    """Keeps tables in its class and of a function, and draws."""

    tables: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.mapped, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = _places(length).cos()
        x = self.other(x * self.tables[length]) * random.random()
        return torch.vmap(self.mapped)(x)


def _tried(net: Net) -> Trial:
    return calls_within(net, list(net.modules()), torch.zeros(2, 3, WIDTH), has_values=True)


def test_nothing_is_left_of_a_run_on_fakes() -> None:
    before = random.getstate()
    net = Net()
    assert _tried(net).failure is None
    assert not Net.tables
    assert not _places.cache_info().currsize
    assert random.getstate() == before
    assert net(torch.zeros(2, 3, WIDTH)).isfinite().all()
    Net.tables.clear()
    _places.cache_clear()


def test_modules_that_transforms_call_are_told() -> None:
    net = Net()
    found = _tried(net)
    assert found.transformed == {net.mapped}
    assert {net.mapped, net.other} <= found.called
