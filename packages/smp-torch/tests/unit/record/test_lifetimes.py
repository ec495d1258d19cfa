from __future__ import annotations

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.torch.record.costs.lifetimes import Lifetimes

WIDTH, EXAMPLES = 4, 2
STREAM = WIDTH * EXAMPLES * 4


class Block(nn.Module):
    """A residual stream with a branch that widens it."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.widen(x).relu())


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.widen(x).relu_())
        y += x
        return y.unflatten(1, (2, -1)).flatten(1)


@pytest.mark.parametrize("kind", [Block, InPlace])
def test_what_crosses_is_what_is_needed_behind(kind: type[Block]) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH))
    profile = Recorded(module, {}).passes(module, torch.ones(EXAMPLES, WIDTH)).profile
    names = {each: name for name, each in module.named_modules()}
    crossing = {
        names[each]: profile.crossing[costs.order] for each, costs in profile.modules.items()
    }
    assert crossing == {
        "": 0,
        "0": 0,  # the input of a step is on all ranks
        "1": STREAM,
        "1.widen": STREAM,
        "1.narrow": STREAM + 3 * STREAM,
        "2": STREAM,
    }
    assert len(profile.crossing) == 7


def test_what_has_no_memory_of_its_own_is_left_out() -> None:
    lifetimes = Lifetimes()
    sparse = torch.eye(4).to_sparse()
    lifetimes.note([sparse], [sparse, torch.ones(4)])
    assert lifetimes.crossing(0) == [0]


def test_memory_of_the_same_number_is_not_the_same() -> None:
    lifetimes = Lifetimes()
    x = torch.ones(4)
    for called in (1, 2, 3):
        lifetimes.called = called
        made = torch.ones(4)  # its number may be that of the one before
        lifetimes.note([x], [made])
        del made
    assert lifetimes.crossing(3) == [0, 0, 0, 0]
