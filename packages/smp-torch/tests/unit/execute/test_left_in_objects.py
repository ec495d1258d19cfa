"""What modules leave in objects, or give back, only from some later step on; without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.state.carried import CarriedObjects

WIDTH = 4
BACK_AND_FORTH = (0, 1, 1, 0)


class Log:
    def __init__(self) -> None:
        self.last: Any = None
        self.all: list[torch.Tensor] = []
        self.count = 0
        self.mean = 0.0
        self.total = torch.zeros(WIDTH)


@dataclasses.dataclass
class Fields:
    last: Any = None


#: What the last layer does, once it is told to: ``y`` is what it returns.
Later = Callable[[Any, torch.Tensor], Any]


class Layer(nn.Linear):
    """Leaves what it computes in an object."""

    later: Later | None = None

    def forward(self, x: torch.Tensor, log: Any) -> Any:  # type: ignore[override]
        y = torch.tanh(super().forward(x))
        if self.later is not None:
            y = self.later(log, y)
        if isinstance(log, Log):
            log.last = y.detach()
            log.all.append(log.last)
            log.count += 1
            log.mean = 0.5
        return y


class Layers(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in BACK_AND_FORTH)
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log = self.make()
        for layer in self.layers:
            x = layer(x, log)
        return x


def planned(make: Callable[[], Any] = Log) -> tuple[Layers, Plan, torch.Tensor]:
    torch.manual_seed(0)
    module = Layers(make)
    step = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)})
    x = torch.randn(3, WIDTH)
    return module, step.plan(module, x), x


def run(plan: Plan, x: torch.Tensor) -> torch.Tensor:
    """Runs all segments in order, each on the objects of its rank."""
    values: dict[int, torch.Tensor] = {}
    carried = [CarriedObjects(), CarriedObjects()]
    for segment in plan.segments:
        program = Program(plan, segment, CPU, StepRandom(CPU))
        inputs = [x, *(each.tensor for each in plan.graph.constants)]
        arguments = [values[value.index] for value in segment.inputs]
        results = program.run(inputs, carried[segment.rank], *arguments)
        values |= {v.index: each for v, each in zip(segment.outputs, results, strict=True)}
    (returned,) = plan.graph.returned
    return values[returned.index]


SEEN: dict[str, Later] = {
    "how many": lambda log, y: y * len(log.all) + log.count,
    "a shape": lambda log, y: y * log.last.shape[1] + (log.last is None),
    "its own": lambda log, y: y + log.all[0],
}


@pytest.mark.parametrize("later", SEEN)
def test_what_others_have_left_is_there(later: str) -> None:
    module, plan, x = planned()
    assert torch.equal(run(plan, x), module(x))
    module.layers[3].later = SEEN[later]
    assert torch.equal(run(plan, x), module(x))


NEEDED: dict[str, Later] = {
    "the last one": lambda log, y: y + log.last,
    "a mean of all": lambda log, y: y + torch.stack(log.all).mean(),
    "a number in a tensor": lambda log, y: y + log.last[0, 0].item(),
    "a branch by one": lambda log, y: y if log.last.sum() > 0 else -y,
    "a number": lambda log, y: y * log.mean,
    "a branch by a number": lambda log, y: y if log.mean > 1 else -y,
    "a number as a text": lambda log, y: y + len(f"{log.mean:.2f}"),
}


@pytest.mark.parametrize("later", NEEDED)
def test_who_computes_with_it_is_told_that_it_is_elsewhere(later: str) -> None:
    module, plan, x = planned()
    module.layers[3].later = NEEDED[later]
    with pytest.raises(
        UnsupportedError, match=r"what layers\.[0-2] has left in an object of class Log"
    ):
        run(plan, x)


def _leaves(name: str, value: Any) -> Later:
    def later(log: Any, y: torch.Tensor) -> torch.Tensor:
        setattr(log, name, value)
        return y

    return later


LEFT: dict[str, Later] = {
    "one more": lambda log, y: log.all.append(y) or y,
    "another number": _leaves("count", 7),
    "a new attribute": _leaves("new", 1),
}


@pytest.mark.parametrize("later", LEFT)
def test_what_others_count_on_has_to_be_left(later: str) -> None:
    module, plan, x = planned()
    module.layers[2].later = LEFT[later]
    with pytest.raises(UnsupportedError, match=r"layers\.2 leaves something else in an object"):
        run(plan, x)


def test_a_tensor_in_an_object_is_not_written_to_for_others() -> None:
    torch.manual_seed(0)
    module = Layers(Log)
    for layer in module.layers:
        layer.later = lambda log, y: y + log.total.add_(1)
    step = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)})
    with pytest.raises(UnsupportedError):
        step.plan(module, torch.randn(3, WIDTH))


def _puts_in(log: Any, y: torch.Tensor) -> torch.Tensor:
    if isinstance(log, list):
        log.append(y)
    else:
        log.last = y
    return y


@pytest.mark.parametrize("make", [list, Fields])
def test_containers_are_left_as_they_are_given(make: Callable[[], Any]) -> None:
    module, plan, x = planned(make)
    assert torch.equal(run(plan, x), module(x))
    module.layers[0].later = _puts_in
    with pytest.raises(
        UnsupportedError, match=r"layers\.0 changes a (list|Fields) that it is given"
    ):
        run(plan, x)
    step = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)})
    with pytest.raises(
        UnsupportedError, match=r"layers\.0 changes a (list|Fields) that it is given"
    ):
        step.plan(module, x)


class Pair(nn.Linear):
    returned: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, self.returned if self.returned is None else self.returned(y)


@pytest.mark.parametrize("returned", [lambda y: y, lambda y: [y, y], lambda y: 1])
def test_a_module_returns_as_much_as_it_did(returned: Callable[[Any], Any]) -> None:
    module = nn.Sequential(Pair(WIDTH, WIDTH))
    step = Recorded(module, {"0": 0})
    x = torch.randn(3, WIDTH)
    plan = step.plan(lambda x: module(x)[0], x)
    run(plan, x)
    module[0].returned = returned
    with pytest.raises(
        UnsupportedError, match=r"0 returned \(a tensor, .* where the recording had"
    ):
        run(plan, x)
