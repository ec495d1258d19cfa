"""What modules leave in objects, or give back, only from some later step on; without processes."""

from __future__ import annotations

import array
import collections
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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
        if isinstance(log, Shelf):
            log.log.count += 1
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
        self.between: Later | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log = self.make()
        for number, layer in enumerate(self.layers):
            x = layer(x, log)
            if self.between is not None and number % 2 == 0:
                self.between(log, x)
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


@pytest.mark.parametrize("change", ["shelf.first[0] += 1", "shelf.first.append(3)"])
def test_what_another_module_changes_where_one_is_known_to_is_seen(change: str) -> None:
    torch.manual_seed(0)
    module, x = Layers(Shelf), torch.randn(3, WIDTH)
    module.layers[1].later = _run_by("shelf.first.append(2)")
    plan = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)}).plan(
        module, x
    )
    module.layers[2].later = _run_by(change)
    module.layers[3].later = _reads
    assert outcome(module, plan, x) == "refused"


def test_tensors_of_one_memory_are_so_in_copies() -> None:
    def shelf() -> Any:
        found = Shelf()
        found.seen = found.total[1:]  # type: ignore[attr-defined]
        return found

    torch.manual_seed(0)
    module, x = Layers(shelf), torch.randn(3, WIDTH)
    module.layers[0].later = _run_by("shelf.total[2] += 1")
    plan = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)}).plan(
        module, x
    )
    module.layers[3].later = lambda shelf, y: y * shelf.seen.sum()
    assert outcome(module, plan, x) == "exact"


#: What has contents that no attribute shows, how a layer changes it, and what it shows then.
HIDDEN: dict[str, tuple[Callable[[], Any], str, Callable[[Any], float]]] = {
    "an array of NumPy": (lambda: np.zeros(3), "shelf.hidden += 1", lambda it: float(it.sum())),
    "another size": (
        lambda: np.zeros(1),
        "shelf.hidden.resize(len(shelf.hidden) + 1, refcheck=False)",
        len,
    ),
    "bytes": (lambda: bytearray(2), "shelf.hidden[0] += 1", lambda it: it[0]),
    "an array": (lambda: array.array("i", [0]), "shelf.hidden[0] += 1", lambda it: it[0]),
    "a set": (set, "shelf.hidden.add(len(shelf.hidden))", len),
    "counts": (collections.Counter, "shelf.hidden.update('a')", lambda it: it["a"]),
    "an order": (
        lambda: collections.OrderedDict(a=1, b=2),
        "shelf.hidden.move_to_end('a'); shelf.hidden[len(shelf.hidden)] = 1",
        lambda it: len(it) + 10 * [*it].index("a"),
    ),
    "numbers": (lambda: types.SimpleNamespace(numbers=0), "shelf.hidden.numbers += 1", vars),
}


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("kind", HIDDEN)
def test_contents_that_no_attribute_shows_are_on_all_copies(kind: str, is_later: bool) -> None:
    make, change, shown = HIDDEN[kind]

    def shelf() -> Any:
        found = Shelf()
        found.hidden = make()  # type: ignore[attr-defined]
        return found

    def reads(shelf: Any, y: torch.Tensor) -> torch.Tensor:
        found = shown(shelf.hidden)
        return y * (1 + (found["numbers"] if isinstance(found, dict) else found))

    torch.manual_seed(0)
    module, x = Layers(shelf), torch.randn(3, WIDTH)
    if not is_later:
        for layer in module.layers:
            layer.later = _run_by(change)
    plan = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)}).plan(
        module, x
    )
    module.layers[3].later = reads
    if is_later:
        module.layers[1].later = _run_by(change)
    assert outcome(module, plan, x) == ("refused" if is_later else "exact")


class Shelf:
    """Has containers in containers, and tensors that its layers leave alone when recorded."""

    def __init__(self) -> None:
        self.first: Any = [1, 2]
        self.second: Any = [3]
        self.drawers: Any = {"x": [1], "y": {"z": [2, 3]}}
        self.log = Log()
        self.total = torch.zeros(WIDTH)
        self.other = torch.ones(WIDTH)


def _shown(shelf: Any) -> float:
    """Returns a number for what is in a shelf, its tensors included."""
    pending, found = [shelf], 0.0
    while pending:
        item = pending.pop()
        found *= 1.25
        if isinstance(item, Shelf | Log):
            pending += vars(item).values()
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list | tuple):
            found += len(item)
            pending += item
        elif isinstance(item, torch.Tensor):
            found += item.sum().item()
        elif item is not None:
            found += item
    return found


def _run_by(text: str) -> Later:
    def later(shelf: Any, y: torch.Tensor) -> torch.Tensor:
        exec(text, {"shelf": shelf, "y": y.detach(), "torch": torch})
        return y

    return later


#: What a layer does to a shelf.
CHANGES = (
    *("shelf.first.append(4)", "shelf.drawers['y']['z'].append(4)", "shelf.log.count += 1"),
    *("shelf.log.new = 3", "del shelf.second", "shelf.second = None", "shelf.drawers['x'].clear()"),
    *("shelf.first, shelf.second = shelf.second, shelf.first", "shelf.second = shelf.first"),
    *("shelf.drawers['x'], shelf.drawers['y'] = shelf.drawers['y'], shelf.drawers['x']",),
    *("shelf.first = (shelf.second, shelf.second)", "shelf.second = [shelf.first, shelf.first]"),
    *("shelf.first = shelf.drawers.pop('y')", "shelf.first, shelf.second = 5, shelf.first"),
    *("shelf.total = shelf.total + 1", "shelf.total.add_(1)", "shelf.total = y.sum(0)"),
    *("shelf.total, shelf.other = shelf.other, shelf.total", "shelf.log.total = shelf.other"),
    *("shelf.log = type(shelf.log)()", "shelf.drawers = dict(shelf.drawers)"),
)
#: Where the layers are.
PLACES = (BACK_AND_FORTH, pytest.param((1, 0, 1, 0), marks=pytest.mark.slow))


def outcome(module: Layers, plan: Plan, x: torch.Tensor) -> str:
    want = module(x)
    try:
        return "exact" if torch.equal(run(plan, x), want) else "wrong"
    except UnsupportedError:
        return "refused"


def _reads(shelf: Any, y: torch.Tensor) -> torch.Tensor:
    return y * _shown(shelf)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_later_is_found_or_refused(change: str, places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = Layers(Shelf), torch.randn(3, WIDTH)
    plan = Recorded(module, {f"layers.{n}": p for n, p in enumerate(places)}).plan(module, x)
    assert outcome(module, plan, x) == "exact"
    module.layers[3].later = _reads
    outcomes = [outcome(module, plan, x)]
    for number in range(3):
        module.layers[number].later = _run_by(change)
        outcomes.append(outcome(module, plan, x))
        module.layers[number].later = None
    assert "wrong" not in outcomes
    #: What the rank of the reader changes itself is no matter of others, after these.
    assert outcomes[0] == "exact"
    assert "refused" in outcomes[1:]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("changes", [*itertools.pairwise(CHANGES[:14] + CHANGES[4:7])])
def test_what_two_change_is_done_to_all_copies(
    changes: tuple[str, str], places: tuple[int, ...]
) -> None:
    """Also where the first one gives what the second one changes another place."""
    exact = 0
    for order in (changes, changes[::-1]):
        torch.manual_seed(0)
        module, x = Layers(Shelf), torch.randn(3, WIDTH)
        for layer, change in zip(module.layers, order, strict=False):
            layer.later = _run_by(change)
        module.layers[3].later = lambda shelf, y: y * len(repr(list(_plain(shelf))))
        try:
            module(x)
        except (AttributeError, KeyError):
            continue  # the one takes away what the other needs
        step = Recorded(module, {f"layers.{n}": p for n, p in enumerate(places)})
        try:
            plan = step.plan(module, x)
        except UnsupportedError:
            continue
        found = outcome(module, plan, x)
        assert found != "wrong"
        exact += found == "exact"
    assert exact


@pytest.mark.parametrize("reads", [_reads, None])
@pytest.mark.parametrize("change", [*CHANGES, "shelf.last = y"])
def test_what_code_between_modules_changes_is_found_or_refused(
    change: str, reads: Later | None
) -> None:
    torch.manual_seed(0)
    module, x = Layers(Shelf), torch.randn(3, WIDTH)
    module.between = _run_by(change)
    module.layers[3].later = reads
    try:
        module(x)
    except (AttributeError, KeyError):
        return  # what the first has taken away
    step = Recorded(module, {f"layers.{n}": p for n, p in enumerate(BACK_AND_FORTH)})
    plan, told = None, ""
    try:
        plan = step.plan(module, x)
    except UnsupportedError as error:
        told = str(error)
    assert plan is not None or "code between modules has changed" in told
    assert plan is None or outcome(module, plan, x) == "exact"


def _plain(item: Any) -> Iterator[Any]:
    """Yields what is no tensor in a shelf."""
    if isinstance(item, Shelf | Log):
        item = vars(item)
    if isinstance(item, dict):
        for key, each in item.items():
            yield key
            yield from _plain(each)
    elif isinstance(item, list | tuple):
        yield "("
        for each in item:
            yield from _plain(each)
        yield ")"
    elif not isinstance(item, torch.Tensor):
        yield item


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
