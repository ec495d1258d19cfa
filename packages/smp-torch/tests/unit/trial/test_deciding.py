"""Modules that decide by their input: what a real call changes must be known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.record.ir import NodeKind
from smdistributed.modelparallel.torch.trial.deciding import known_changes

WIDTH = 4
RANDOM = StepRandom(torch.device("cpu"))
LOG: list[int] = []
SHARED = {"count": 0}


class Deciding(nn.Linear):
    """Changes something for inputs that no trial has."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)
        self.inner = nn.Identity()
        self.count = 0
        self.items = [0]
        self._change = [change]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 1).all():
            self._change[0](self)
        return super().forward(self.inner(x))


def attribute(module: Any) -> None:
    module.count += 1


def inner(module: Any) -> None:
    module.inner.new = 1


def item(module: Any) -> None:
    module.items[0] += 1


def plain(module: Any) -> None:
    module.plain.data.mul_(2)


def buffer(module: Any) -> None:
    module.scale.data.mul_(2)


def new_buffer(module: Any) -> None:
    module.scale = module.scale * 2


def parameter(module: Any) -> None:
    module.weight.data.mul_(2)


def shared(module: Any) -> None:
    SHARED["count"] += 1


def log(module: Any) -> None:
    LOG.append(1)


ORDINARY, RARE = torch.zeros(2, WIDTH), torch.ones(2, WIDTH)
CHANGES = [attribute, inner, item, plain, buffer, new_buffer, parameter, shared]


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_trial_has_shown_is_an_error(change: Any) -> None:
    module = Deciding(change)
    watch = known_changes("the layer", module, {}, is_last=False)
    for _ in range(2):
        with watch:
            module(ORDINARY)
    with (
        pytest.raises(UnsupportedError, match=r"the layer changed .* for the numbers of this"),
        watch,
    ):
        module(RARE)
    # Told once for each time.
    with watch:
        module(ORDINARY)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((attribute, "count"), (item, "items"), (plain, "plain")),
        *((buffer, "scale"), (new_buffer, "scale"), (parameter, "weight")),
    ],
)
def test_what_is_known_is_none(change: Any, name: str) -> None:
    module = Deciding(change)
    watch = known_changes("the layer", module, {module: {name}}, is_last=False)
    for _ in range(2):
        with watch:
            module(RARE)


def test_logs_and_what_others_change_are_none() -> None:
    module = Deciding(log)
    watch = known_changes("the layer", module, {}, is_last=False)
    with watch:
        module(RARE)
    module.count += 1
    with torch.no_grad():
        module.weight.mul_(2)
    with watch:
        module(ORDINARY)


def test_its_own_error_is_told() -> None:
    def fail(module: Any) -> None:
        module.count += 1
        raise KeyError("its own")

    module = Deciding(fail)
    watch = known_changes("the layer", module, {}, is_last=False)
    with pytest.raises(KeyError, match="its own"), watch:
        module(RARE)


def test_a_warning_is_enough_where_nothing_follows() -> None:
    module = Deciding(attribute)
    watch = known_changes("the layer", module, {}, is_last=True)
    with pytest.warns(UserWarning, match=r"the layer changed Deciding\.count"), watch:
        module(RARE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch:
            module(ORDINARY)


def test_who_decides_is_watched_in_real_calls() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Deciding(attribute), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(WIDTH))
        module[0].bias.zero_()
    step = Recorded(module, {"0": 0, "1": 0, "2": 1})
    plan = step.plan(lambda x: module(x).sum(), ORDINARY)
    decides = {node.target: node.decides for node in plan.graph.nodes if node.kind is NodeKind.LEAF}
    assert [decides[each] for each in module] == [False, True, False]
    first = Program(plan, plan.segments[0], torch.device("cpu"), RANDOM)
    first.run([ORDINARY], None)
    with pytest.raises(UnsupportedError, match=r"1 changed Deciding\.count for the numbers"):
        first.run([RARE], None)
