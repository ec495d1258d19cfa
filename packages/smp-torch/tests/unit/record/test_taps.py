"""Tensors that leave a leaf by another way than its result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.record.trace.taps import (
    container_taps,
    function_taps,
    tapped,
)
from smdistributed.modelparallel.torch.state.growth import Growth


class Squares(nn.Module):
    """Squares its input a number of times, and keeps what the last square was."""

    def __init__(self) -> None:
        super().__init__()
        self.num_squares = 2
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_squares):
            x = x.square()
        self.kept.append(x)
        return x + 1


def _call(module: Squares, taken: bool = False) -> torch.Tensor:
    square = torch.Tensor.square
    made = [(square, "square", [((), torch.zeros(1))])] * 2
    taps = [tap for tap, _ in function_taps(made)]
    _, found = tapped(module, taps[1:], [module.kept] if taken else [])(torch.tensor([3.0]))
    return found[0]


def test_a_call_of_a_function_gives_what_it_made() -> None:
    assert _call(Squares()).item() == 81


def test_a_leaf_that_makes_another_number_of_calls_is_refused() -> None:
    module = Squares()
    module.num_squares = 3
    with pytest.raises(UnsupportedError, match="called square 3 times, and 2 times"):
        _call(module)


def test_what_code_outside_has_taken_is_taken_here_too() -> None:
    module = Squares()
    _call(module)
    _call(module, taken=True)
    assert len(module.kept) == 1


def test_what_is_kept_by_the_identity_of_a_module_has_the_same_name_on_every_rank() -> None:
    with FakeTensorMode():
        fake = torch.empty(1)
    modules = nn.Identity(), nn.Identity()
    growths = [Growth("kept", {id(each): fake}, {id(each): fake}, {}) for each in modules]
    names = [str(tap) for growth in growths for tap, _ in container_taps([growth])]
    assert names == ["kept.#0 None"] * 2
