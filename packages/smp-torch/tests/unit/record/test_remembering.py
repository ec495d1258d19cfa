"""Modules that read in the next microbatch what they have kept of this one stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

WIDTH = 4


class Kept(nn.Module):
    def __init__(self, keep: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.keep = nn.Linear(WIDTH, WIDTH), keep
        self.last: Any = None
        self.table: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keep(self, self.inner(x))


def adds_last(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.last is not None:
        x = x + module.last
    module.last = x.detach()
    return x


def averages(module: Any, x: torch.Tensor) -> torch.Tensor:
    mean = x.detach().mean(0)
    former = module.table.get("mean")
    module.table["mean"] = mean if former is None else 0.9 * former + 0.1 * mean
    return x - module.table["mean"]


def shows(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.last = x
    return x * 2


def reads_its_own(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.last = x.detach()
    return x + module.last.mean()


def counts(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.last = (module.last or 0) + 1
    return x


@pytest.mark.parametrize(
    ("keep", "is_whole"),
    [
        (adds_last, True),
        (averages, True),
        (shows, False),
        (reads_its_own, False),
        (counts, False),
    ],
)
def test_a_module_that_remembers_is_not_cut(keep: Any, is_whole: bool) -> None:
    middle = Kept(keep)
    rest = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    recorded = Recorded(nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, *rest), {})

    def body(x: torch.Tensor) -> None:
        recorded.backward(recorded.module(x).square().mean())

    profile = recorded.passes(body, torch.randn(2, WIDTH)).profile
    assert bool(profile.modules[middle].opaque) == is_whole
    # The call that finds it out counts for nothing.
    assert min(profile.crossing) >= 0
