"""``smp.step(static=True)``: Python runs now and then, and must do what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from world import generator, pipeline, run

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.testing import Worlds
from smdistributed.modelparallel.torch.stepping import lockstep
from smdistributed.modelparallel.torch.stepping import static as static_steps

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

WIDTH, MICROBATCHES = 4, 4
FACTORS = {"number": 1.0, "tensor": torch.ones(WIDTH)}


class Seen:
    """An object that the layers of a forward pass hand on."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        x = super().forward(x)
        seen.sums.append(x.sum())
        return x


class Net(nn.ModuleList):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Layer(WIDTH, WIDTH) for _ in range(4))
        self.calls = 0
        self.inner: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        seen = Seen()
        for layer in self:
            x = layer(x, seen)
        x = self.inner(x)
        return x * FACTORS["number"] * FACTORS["tensor"]


def train(
    static: bool,
    num_steps: int,
    between: Callable[[Net, int], object],
    every: int = 3,
) -> tuple[list[float], int]:
    """Returns the losses, and how often the Python of a microbatch has run."""
    static_steps.CHECKED_EVERY = every
    FACTORS.update(number=1.0, tensor=torch.ones(WIDTH))
    net = Net()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @smp.step(static=static)
    def step(x: torch.Tensor, power: int) -> Any:
        loss = (model(x) ** power).mean()
        if net.training:
            model.backward(loss)
        return loss

    numbers, losses = generator(1), []
    for position in range(num_steps):
        between(net, position)
        optimizer.zero_grad()
        losses.append(step(torch.randn(8, WIDTH, generator=numbers), 2).reduce_mean().item())
        optimizer.step()
    return losses, net.calls


def compare_usual() -> None:
    losses, calls = train(False, 7, lambda net, position: None)
    assert calls == 7 * MICROBATCHES
    # In calls 0, 3 and 6.
    assert train(True, 7, lambda net, position: None) == (losses, 3 * MICROBATCHES)


def compare_kinds() -> None:
    def alternate(net: Net, position: int) -> None:
        net.train(position % 2 == 0)

    losses, _ = train(False, 6, alternate)
    assert train(True, 6, alternate, every=100) == (losses, 2 * MICROBATCHES)


def compare_tensors() -> None:
    def write(net: Net, position: int) -> None:
        FACTORS["tensor"].mul_(1.5)

    losses, _ = train(False, 4, write)
    assert train(True, 4, write, every=100) == (losses, MICROBATCHES)


def forget_the_trace() -> None:
    def forget(net: Net, position: int) -> None:
        net.train(position % 2 == 0)

    losses, _ = train(False, 6, forget)
    with mock.patch.object(lockstep, "_MOST_TRACES", 1):
        assert train(True, 6, forget, every=2)[0] == losses


def ask_each_time() -> None:
    def ask(net: Net, position: int) -> None:
        net.inner = lambda x: x + (torch.rand(()) < 0.5)

    losses, _ = train(False, 4, ask)
    assert train(True, 4, ask, every=100)[0] == losses


def break_the_promise(kind: str) -> None:
    def change(net: Net, position: int) -> None:
        if position == 2 and kind == "number":
            FACTORS["number"] = 3.0
        if position == 2 and kind == "made tensor":
            net.inner = lambda x: x * torch.tensor([3.0])
        if position == 0 and kind == "made tensor":
            net.inner = lambda x: x * torch.tensor([2.0])

    losses, _ = train(False, 2, change)
    with pytest.raises(SMPError, match=r"step is declared static=True.*microbatch 0 did"):
        train(True, 7, change)
    assert len(losses) == 2


@pytest.mark.parametrize(
    ("body", "args"),
    [
        (compare_usual, ()),
        (compare_kinds, ()),
        (compare_tensors, ()),
        (forget_the_trace, ()),
        (ask_each_time, ()),
        (break_the_promise, ("number",)),
        (break_the_promise, ("made tensor",)),
    ],
)
def test_static(worlds: Worlds, body: Callable[..., None], args: tuple[str, ...]) -> None:
    run(worlds, pipeline(2, MICROBATCHES, launcher="fork"), body, *args)
