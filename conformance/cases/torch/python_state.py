"""PyTorch: numbers that Python keeps anywhere and changes at any time: right, or refused.

The models are generated: each *place* where a number can be kept, *who* reads it, and *when* it
changes. A script may do all of that, and has the losses of one process or an error.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.adapters import adapter_of
from conformance.adapters.base import WIDTH
from conformance.cases.common.starting import quickly
from conformance.cases.torch.model import mean_square
from conformance.registry import torch_case
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.testing import RanksFailedError, run_ranks

MICROBATCHES = 4
STEPS = 2
#: A global, and a namespace that is one.
FACTOR: Any = 1.0
SPACE = types.SimpleNamespace(factor=1.0, deep=types.SimpleNamespace(factor=1.0))

Read = Callable[[Any], Any]
Write = Callable[[Any, float], None]


class Slots:
    """Keeps a number where no dict is."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Told:
    """Tells a number in ways that are not attributes."""

    def __init__(self) -> None:
        self.number = 1.0

    @property
    def factor(self) -> float:
        """The number."""
        return self.number

    def __call__(self) -> float:
        """The number."""
        return self.number

    def __getattr__(self, name: str) -> float:
        if name == "other":
            return self.number
        raise AttributeError(name)

    def __getitem__(self, key: str) -> float:
        return self.number


def _set_global(value: float) -> None:
    global FACTOR
    FACTOR = value


def _closed() -> tuple[Read, Write]:
    factor = 1.0

    def write(_: Any, value: float) -> None:
        nonlocal factor
        factor = value

    return lambda _: factor, write


def _with_default() -> tuple[Read, Write]:
    def read(_: Any, factor: float = 1.0) -> float:
        return factor

    def write(_: Any, value: float) -> None:
        read.__defaults__ = (value,)

    return read, write


def _in_a_default() -> tuple[Read, Write]:
    def read(_: Any, table: list[float] = [1.0]) -> float:  # noqa: B006 - what is tried
        return table[0]

    def write(_: Any, value: float) -> None:
        assert read.__defaults__ is not None
        read.__defaults__[0][0] = value

    return read, write


def _of_a_class() -> tuple[Read, Write]:
    class Meta(type):
        factor = 1.0

    class Config(metaclass=Meta):
        table: tuple[list[float], ...] = ([1.0],)

    def write(_: Any, value: float) -> None:
        Meta.factor = value
        Config.table[0][0] = value

    return lambda _: Config.factor * Config.table[0][0], write


def _in(make: Callable[[], Any], read: Callable[[Any], Any], write: Callable[[Any, float], Any]):
    """Returns a place: something that is made, how it is read and written."""

    def place() -> tuple[Read, Write]:
        thing = make()
        return lambda _: read(thing), lambda _, value: write(thing, value)

    return place


def _tensor(value: float) -> Any:
    import torch

    return torch.tensor(value)


def _put(key: Any) -> Callable[[Any, float], None]:
    return lambda thing, value: thing.__setitem__(key, value)


def _set(name: str) -> Callable[[Any, float], None]:
    return lambda thing, value: setattr(thing, name, value)


def _first(thing: Any) -> Any:
    return thing[0]


PLACES: dict[str, Callable[[], tuple[Read, Write]]] = {
    "a global": lambda: (lambda _: FACTOR, lambda _, value: _set_global(value)),
    "a namespace": lambda: (lambda _: SPACE.factor, lambda _, v: setattr(SPACE, "factor", v)),
    "deep": lambda: (lambda _: SPACE.deep.factor, lambda _, v: setattr(SPACE.deep, "factor", v)),
    "a closure": _closed,
    "a default": _with_default,
    "a list in a default": _in_a_default,
    "a class": _of_a_class,
    "an attribute": lambda: (lambda m: m.factor, lambda m, value: setattr(m, "factor", value)),
    "a list of the module": lambda: (lambda m: m.table[0], lambda m, v: m.table.__setitem__(0, v)),
    "a list": _in(lambda: [1.0], _first, _put(0)),
    "a list in a list": _in(lambda: [[1.0]], lambda x: x[0][0], lambda x, v: _put(0)(x[0], v)),
    "a list in a tuple": _in(lambda: ([1.0],), lambda x: x[0][0], lambda x, v: _put(0)(x[0], v)),
    "a list that is replaced": _in(
        lambda: [[1.0]], lambda x: x[0][0], lambda x, v: _put(0)(x, [v])
    ),
    "a dict": _in(lambda: {"a": 1.0}, lambda x: x["a"], _put("a")),
    "a dict in a deque": _in(
        lambda: collections.deque([{"a": 1.0}]),
        lambda x: x[0]["a"],
        lambda x, v: _put("a")(x[0], v),
    ),
    "the order of a dict": _in(
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda x: next(iter(x.values())),
        lambda x, v: x.move_to_end(next(iter(x))),
    ),
    "a deque": _in(lambda: collections.deque([1.0]), _first, _put(0)),
    "a set": _in(lambda: {0}, lambda x: float(len(x)), lambda x, v: x.add(v)),
    "a slot": _in(Slots, lambda x: x.factor, _set("factor")),
    "a slot in a dict": _in(
        lambda: {"a": Slots()}, lambda x: x["a"].factor, lambda x, v: _set("factor")(x["a"], v)
    ),
    "a property": _in(Told, lambda x: x.factor, _set("number")),
    "what is called": _in(Told, lambda x: x(), _set("number")),
    "what is got": _in(Told, lambda x: x.other, _set("number")),
    "an item": _in(Told, lambda x: x["a"], _set("number")),
    "a partial": _in(
        lambda: [functools.partial(float, 1.0)],
        lambda x: x[0](),
        lambda x, v: _put(0)(x, functools.partial(float, v)),
    ),
    "a bound method": _in(
        lambda: [[1.0].copy],
        lambda x: x[0]()[0],
        lambda x, v: _put(0)(x, [v].copy),
    ),
    "an array": _in(lambda: np.ones(1), lambda x: float(x[0]), _put(0)),
    "an array of objects": _in(lambda: np.array([1.0], object), _first, _put(0)),
    "bytes": _in(
        lambda: bytearray([10]), lambda x: x[0] / 10, lambda x, v: _put(0)(x, int(10 * v))
    ),
    "a tensor": _in(lambda: _tensor(1.0), lambda x: x * 1.0, lambda x, v: x.fill_(v)),
    "a number of a tensor": _in(lambda: _tensor(1.0), lambda x: x.item(), lambda x, v: x.fill_(v)),
    "a tensor that is replaced": _in(
        lambda: [_tensor(1.0)], _first, lambda x, v: _put(0)(x, _tensor(v))
    ),
    "a tensor that is computed": _in(
        lambda: {"a": _tensor(1.0)}, lambda x: x["a"], lambda x, v: _put("a")(x, x["a"] * 0.5 + v)
    ),
    "a tensor in a tuple": _in(
        lambda: [(_tensor(1.0),)], lambda x: x[0][0], lambda x, v: _put(0)(x, (x[0][0] + v,))
    ),
    "a count": _in(
        lambda: itertools.count(1), lambda x: float(repr(x)[6:-1]), lambda x, v: next(x)
    ),
    "a cycle": _in(
        lambda: [itertools.cycle([1.0, 2.0, 0.5])], lambda x: next(x[0]), lambda x, v: next(x[0])
    ),
    "an iterator": _in(lambda: iter([1.0, 2.0, 0.5] * 99), lambda x: next(x), lambda x, v: next(x)),
}

#: Who reads the number: a module that is split, or one that stays whole.
READERS = ("split", "whole")
#: When the number changes.
MOMENTS = ("between steps", "before the model", "between modules")


def places_of(moment: str, reader: str) -> list[str]:
    """Returns places to try: at one moment a reader, since smp-torch's own tests try them all."""
    first = MOMENTS.index(moment) + READERS.index(reader)
    return list(PLACES)[first % len(MOMENTS) :: len(MOMENTS)]


def script(place: str, moment: str, reader: str) -> tuple[Any, Any, Callable[[], None]]:
    """Returns a model, the body of its step, and what happens between two steps."""
    import torch
    from torch import nn

    _set_global(1.0)
    SPACE.factor = SPACE.deep.factor = 1.0
    read, write = PLACES[place]()
    values = itertools.cycle([1.5, 0.5, 2.0, 0.25, 1.25])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.factor, self.table = 1.0, [1.0]

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.linear(x))

    class Reading(Whole):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * read(self)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            kind = Reading if reader == "whole" else Whole
            self.first, self.second = kind(), kind()
            self.factor, self.table = 1.0, [1.0]

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            if reader == "split":
                x = x * read(self)
            if moment == "between modules":
                change()
            x = self.second(x)
            return x * read(self) if reader == "split" else x

    net = Net()

    def change() -> None:
        value = next(values)
        for each in (net.first, net.second) if reader == "whole" else (net,):
            write(each, value)

    def body(model: Any, x: Any) -> Any:
        if moment == "before the model":
            change()
        return mean_square(model, x)

    return net, body, change if moment == "between steps" else lambda: None


def plainly(adapter: Any, net: Any, body: Any, between: Callable[[], None]) -> list[Any]:
    """Returns the losses of each step without the library."""
    net.to(adapter.device)
    net.backward = lambda loss: loss.backward()
    found = []
    for number in range(STEPS):
        parts = adapter.tensor(adapter.batch(8, seed=number)).chunk(MICROBATCHES)
        found.append([body(net, part).detach() for part in parts])
        between()
    return found


def refused(adapter: Any, moment: str, reader: str) -> set[str]:
    """Tries places; returns those whose scripts are refused. None is wrong."""
    smp, found = adapter.smp, set()
    for place in places_of(moment, reader):
        wanted = plainly(adapter, *script(place, moment, reader))
        net, body, between = script(place, moment, reader)
        model = smp.DistributedModel(net.to(adapter.device))
        for index, module in enumerate((net.first, net.second)):
            smp.set_partition(module, index % smp.pp_size())
        step = smp.step(body)
        try:
            for number, losses in enumerate(wanted):
                output = step(model, adapter.tensor(adapter.batch(8, seed=number)))
                got = [each.item() for each in output.outputs]
                assert got == pytest.approx([each.item() for each in losses], rel=1e-5), place
                between()
        except UnsupportedError:
            found.add(place)
    return found


@torch_case("torch.script_rules", worlds=("alone",))
def python_is_free_in_one_process(adapter: Any) -> None:
    for reader in READERS:
        assert not refused(adapter, "between modules", reader)


@torch_case("torch.script_rules", worlds=("pipeline",), is_quick=False)
def what_python_changes_between_steps_is_seen(adapter: Any) -> None:
    assert not refused(adapter, "between steps", "split")
    # Whoever moves it on by reading it does so on stand-ins too.
    assert refused(adapter, "between steps", "whole") <= {"a cycle", "an iterator"}


@torch_case("torch.script_rules", worlds=("pipeline",), is_quick=False)
def what_python_changes_between_microbatches_is_seen_or_refused(adapter: Any) -> None:
    assert not refused(adapter, "before the model", "split")
    refused(adapter, "before the model", "whole")


@torch_case("torch.script_rules", worlds=("pipeline",), is_quick=False)
def what_python_changes_between_modules_is_seen_or_refused(adapter: Any) -> None:
    assert not refused(adapter, "between modules", "split")
    refused(adapter, "between modules", "whole")


def part_ways() -> None:
    """The second of two ranks does something else in the last microbatch of a third step."""
    adapter = adapter_of("torch")
    smp = adapter.smp
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "communication_timeout": 600})
    model, factor, calls = adapter.model(), 1.0, itertools.count()

    def body(model: Any, x: Any) -> Any:
        y = model(x)
        return y * factor if next(calls) % 2 and factor > 1.0 else y

    step, x = smp.step(body), adapter.tensor(adapter.batch(8))
    for now in (1.0, 2.0, 1.0 + smp.rank()):
        factor = now
        step(model, x)


@torch_case(
    "torch.script_rules",
    "common.data_consistency",
    worlds=("new",),
    starts_jobs=True,
    is_quick=False,
)
def ranks_that_go_different_ways_are_told(adapter: Any) -> None:
    with pytest.raises(RanksFailedError, match=r"different computations(?s:.*)rank 1") as error:
        run_ranks(2, part_ways, **quickly(adapter))
    assert "no end within" not in str(error.value)
