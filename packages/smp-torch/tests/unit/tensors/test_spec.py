"""How a tensor looks that is written to in place, at each moment and in each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.torch.planning.segments import Plan

WIDTH = 4
X = torch.ones(2, WIDTH)


class Adding(nn.Linear):
    """Writes to what it is given."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out += super().forward(x)
        return x


class Net(nn.Module):
    """Writes to a tensor on the first partition, and reads it on the second.

    Args:
        write: writes a result of the first partition to a tensor.
        num_writes: how often.
        shown: there is a view of the tensor.
    """

    def __init__(self, write: Callable[..., None], num_writes: int, *, shown: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.adding = Adding(WIDTH, WIDTH)
        self.num_writes = num_writes
        self.shown = shown
        self.factor = 1.0
        self.write = [write]
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        part = out[:, 1:] if self.shown else out
        flags = [out.requires_grad, part.requires_grad]
        h = self.first(x)
        for _ in range(self.num_writes):
            self.write[0](self, out, part, h)
            flags += [out.requires_grad, part.requires_grad]
        self.seen = flags
        read = out if self.factor == 1.0 else out * self.factor
        return self.second(read)  # type: ignore[no-any-return]


def assign(net: Net, out: torch.Tensor, part: torch.Tensor, h: torch.Tensor) -> None:
    out[:, 0] = h[:, 0]


def add(net: Net, out: torch.Tensor, part: torch.Tensor, h: torch.Tensor) -> None:
    out += h


def view(net: Net, out: torch.Tensor, part: torch.Tensor, h: torch.Tensor) -> None:
    part.mul_(2).add_(h[:, : part.shape[1]])


def module(net: Net, out: torch.Tensor, part: torch.Tensor, h: torch.Tensor) -> None:
    net.adding(h, out)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("num_writes", [1, 2, 3])
@pytest.mark.parametrize("write", [assign, add, view, module])
def test_what_was_written_has_its_gradient_in_every_way(
    write: Callable[..., None], num_writes: int, shown: bool
) -> None:
    net = Net(write, num_writes, shown=shown)
    recorded = Recorded(net, {"first": 0, "adding": 0, "second": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).sum()
        recorded.backward(loss)
        return loss

    for factor in (1.0, 1.0, 2.0):  # the last one branches behind the writes
        net.factor = factor
        assert _gradient_comes_back(recorded.plan(body, X)), factor
        # In every microbatch Python sees what it would see of the tensors themselves.
        assert net.seen == [False, False, *[True] * 2 * num_writes]


def _gradient_comes_back(plan: Plan) -> bool:
    """Whether the first segment gets a gradient for the tensor that was written to."""
    (out,) = plan.segments[1].inputs
    return out in plan.with_gradient and plan.backward == {0, 1}


class Showing(nn.Module):
    """Reads a view of what was written to, on the second partition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        out = h.detach() * 2
        part = out.view(-1, WIDTH)
        out += h
        return self.second(part)  # type: ignore[no-any-return]


def test_a_view_has_the_gradient_of_what_was_written_later() -> None:
    net = Showing()
    recorded = Recorded(net, {"first": 0, "second": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).sum()
        recorded.backward(loss)
        return loss

    assert _gradient_comes_back(recorded.plan(body, X))


class Switching(nn.Module):
    """Has a tensor require a gradient by an assignment, which returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.first(x).detach()
        start.requires_grad = True
        (gradient,) = torch.autograd.grad(start.square().sum(), start)
        return self.second(gradient)  # type: ignore[no-any-return]


def test_an_assigned_flag_is_part_of_what_is_computed() -> None:
    net = Switching()
    recorded = Recorded(net, {"first": 0, "second": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: Any = net(x).sum()
        recorded.backward(loss)
        return loss  # type: ignore[no-any-return]

    names = [node.name for node in recorded.plan(body, X).graph.nodes]
    assert "torch.Tensor.requires_grad.__set__" in " ".join(names)
