"""Parameters in parts that are whole for an update: here one rank has the only part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.parts.at_rest import Lying, PartView, hide
from smdistributed.modelparallel.torch.parts.blocks import Blocks
from smdistributed.modelparallel.torch.parts.together import Together


class Home:
    """Brings parts together, and counts how often."""

    held = "one rank has all"
    view_class: type[torch.Tensor] = PartView
    when = ""

    def __init__(self) -> None:
        self.gathers = self.updates = 0

    def is_at_rest(self, blocks: Blocks) -> bool:
        return True

    def prepare(self) -> None: ...

    def differentiable(self, tensor: Any, whole: Any) -> None: ...

    def agree(self, blocks: Blocks) -> None: ...

    def gather(self, blocks: Blocks) -> torch.Tensor:
        self.gathers += 1
        return blocks.values.detach().clone()

    def updated(self) -> None:
        self.updates += 1


class Held(PartView):
    """A parameter whose gradients and data are those of a tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.grad.__get__, torch.Tensor.grad.__set__):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def take_data(self, tensor: torch.Tensor) -> None:
        self.taken = tensor
        self.lying.blocks.values.copy_(tensor)

    def take_gradient(self, tensor: torch.Tensor | None) -> None:
        self.grad = tensor


@pytest.fixture
def held() -> Any:
    home = Home()
    values = torch.arange(6.0).view(2, 3)
    blocks = Blocks("weight", values.shape, Rectangle.whole((2, 3)), values, home, "weight")
    parameter: Any = nn.Parameter(torch.zeros(2, 3))
    hide(parameter, Held, Lying.all_of(blocks))
    parameter.home = home  # which blocks know weakly
    return parameter


def values(parameter: Any) -> Any:
    return parameter.lying.blocks.values.tolist()


def test_many_functions_gather_once(held: Any) -> None:
    with torch.no_grad(), Together([held]):
        assert type(held) is nn.Parameter
        held.mul_(2).add_(held.norm() * 0)
    assert isinstance(held, Held)
    assert values(held) == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert (held.home.gathers, held.home.updates) == (1, 1)


def test_gradients_are_whole_and_may_go(held: Any) -> None:
    gradient = torch.ones(2, 3)
    held.grad = gradient
    with torch.no_grad(), Together([held]):
        assert held.grad is gradient
        held.grad = None
    assert held.grad is None


def test_in_parts_for_a_closure(held: Any) -> None:
    together = Together([held])
    with torch.no_grad(), together:
        held.add_(1)
        with together.apart():
            assert isinstance(held, Held)
            assert values(held)[0] == [1.0, 2.0, 3.0]
            held.lying.blocks.values.zero_()
        assert not held.any()


def test_other_data_is_taken(held: Any) -> None:
    with Together([held]):
        held.data = held.data - 1
    assert values(held)[0] == [-1.0, 0.0, 1.0]


def test_a_view_that_is_kept_is_refused(held: Any) -> None:
    kept = []
    refused = pytest.raises(UnsupportedError, match="keeps a view of weight, of which one rank")
    with refused, torch.no_grad(), Together([held]):
        kept.append(held.view(-1))


def test_what_fails_leaves_parts(held: Any) -> None:
    with pytest.raises(ValueError, match="no update"), Together([held]):
        raise ValueError("no update")
    assert isinstance(held, Held)


def test_data_that_is_kept_besides_is_told(held: Any) -> None:
    """As what sharpness-aware optimizers come back to: whoever keeps it sees the parameter."""
    kept = torch.full((2, 3), 7.0)
    with Together([held], kept=lambda: [kept]):
        held.data = kept
    assert held.taken is kept
