"""Which modules are the blocks of a model, and which of them are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.torch.activations.blocks import checkpoint_blocks, stacks_of


class Block(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.inner = nn.ModuleList(inner)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.map(x).tanh()


def a_stack(count: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


def test_blocks_are_the_outermost_modules_of_one_class_in_a_row() -> None:
    experts = nn.Sequential(Block(Block(), Block()), Block(Block()))
    shared = Block()
    model = nn.ModuleDict(
        {
            "stages": nn.Sequential(a_stack(2), a_stack(3)),
            "experts": experts,
            "maps": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            "mixed": nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Tanh()),
            "twice": nn.ModuleList([shared, shared]),
            "alone": nn.ModuleList([Block()]),
        }
    )
    found = stacks_of(model)
    assert [len(stack) for stack in found] == [2, 3, 2, 2]
    assert found[2] == list(experts)
    assert found[3] == list(model["mixed"])[1:3]


@pytest.mark.parametrize(("every", "calls"), [(0, [1] * 5), (1, [2] * 5), (2, [2, 1, 2, 1, 2])])
def test_chosen_blocks_are_computed_again(every: int, calls: list[int]) -> None:
    torch.manual_seed(0)
    model, x = a_stack(5), torch.ones(2, 4)
    model(x).sum().backward()
    expected = [each.grad for each in model.parameters()]
    model.zero_grad()
    checkpoint_blocks(model, every)
    checkpoint_blocks(model, every)  # which changes nothing
    for block in model:
        block.calls = 0
    model(x).sum().backward()
    assert [block.calls for block in model] == calls
    assert all(map(torch.equal, expected, [each.grad for each in model.parameters()]))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear has none: call smp\.set_activation"):
        checkpoint_blocks(nn.Linear(4, 4), 1)
