"""Stand-ins that code has stored are replaced where code finds them."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.ir import Graph, Value
from smdistributed.modelparallel.torch.record.trace import strays
from smdistributed.modelparallel.torch.record.trace.places import places_of
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind, Trace, Way
from smdistributed.modelparallel.torch.state.snapshot import Snapshot


class Instance:
    stored: Any = None


class Slots:
    __slots__ = ("stored",)


def in_a_class() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    class OfAClass:
        stored: Any = None

    return lambda value: setattr(OfAClass, "stored", value), lambda: OfAClass.stored


def in_an_instance() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each = Instance()
    return lambda value: setattr(each, "stored", value), lambda: each.stored


def in_slots() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each = Slots()
    return lambda value: setattr(each, "stored", value), lambda: each.stored


def in_a_dict() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each: dict[str, Any] = {}
    return lambda value: each.update(stored=value), lambda: each["stored"]


def in_a_list() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each: list[Any] = [None]
    return lambda value: each.__setitem__(0, value), lambda: each[0]


def in_a_deque() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each: collections.deque[Any] = collections.deque([None])
    return lambda value: each.__setitem__(0, value), lambda: each[0]


def in_a_tuple() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each = Instance()

    def put(value: Any) -> None:
        each.stored = ((value, 1), "a")

    return put, lambda: each.stored[0][0]


def in_a_place_that_a_module_sees() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each: dict[str, Any] = {"stored": None}

    def put(value: Any) -> None:
        each["stored"] = value
        seen = Snapshot((), [put])
        assert seen.differences() == []  # from here on it knows what is there by identity
        snapshots.append(seen)

    snapshots: list[Snapshot] = []
    return put, lambda: each["stored"]


def in_a_closure() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    stored: Any = None

    def put(value: Any) -> None:
        nonlocal stored
        stored = value

    return put, lambda: stored


PLACES = [
    *(in_a_class, in_an_instance, in_slots, in_a_dict, in_a_list, in_a_deque, in_a_tuple),
    *(in_a_closure, in_a_place_that_a_module_sees),
]


def a_value() -> Value:
    value: Value = Value.__new__(Value)
    value.index = 0
    return value


@pytest.mark.parametrize("place", PLACES)
def test_what_a_microbatch_stores_is_closed_and_filled(
    place: Callable[[], tuple[Callable[[Any], None], Callable[[], Any]]],
) -> None:
    put, read = place()
    with FakeTensorMode():
        fake = torch.ones(2)
    put(fake)
    scene: Any = types.SimpleNamespace(hidden=set(), slots={})
    value = a_value()
    (stored,) = strays.settle([fake], Trace([]), scene, lambda tensor: None, {id(fake): value})
    assert stored.values == [value]
    assert stored.close()
    with pytest.raises(UnsupportedError, match="an earlier microbatch"):
        float(read())
    assert not stored.close()
    real = torch.ones(2)
    stored.fill({0: real})
    assert torch.equal(read(), real)
    stored.fill({0: torch.zeros(2)})  # of an earlier microbatch
    assert torch.equal(read(), real)
    put(fake)
    with pytest.raises(UnsupportedError, match="stored a tensor"):
        strays.settle([fake], Trace([]), scene, lambda tensor: None, {})


@pytest.mark.parametrize("place", PLACES)
def test_code_that_has_read_a_stand_in_reads_the_tensor(
    place: Callable[[], tuple[Callable[[Any], None], Callable[[], Any]]],
) -> None:
    put, read = place()
    with FakeTensorMode():
        fake = torch.ones(2)
    real = torch.ones(2)
    put(fake)
    for _ in range(100):  # Python remembers where it has found an attribute
        assert read() is fake
    scene: Any = types.SimpleNamespace(hidden=set(), slots={})
    assert strays.settle([fake], Trace([]), scene, lambda tensor: real, {}) == []
    assert read() is real


def test_what_a_failed_step_has_left_to_the_collector_stores_nothing() -> None:
    """Its error refers to itself by way of frames, with what they were given."""
    with FakeTensorMode():
        fake = torch.ones(2)
    left: list[Any] = [fake]
    left.append(left)
    del left
    scene: Any = types.SimpleNamespace(hidden=set(), slots={})
    value = a_value()
    assert strays.settle([fake], Trace([]), scene, lambda tensor: None, {id(fake): value}) == []


@pytest.mark.parametrize("hold", [lambda fake: {fake}, functools.partial(functools.partial, id)])
def test_what_cannot_be_taken_out_of_an_object_is_refused(hold: Callable[[Any], Any]) -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    each = Instance()
    each.stored = hold(fake)
    scene: Any = types.SimpleNamespace(hidden=set(), slots={})
    values = {id(fake): a_value()}
    with pytest.raises(UnsupportedError, match="stored a tensor in a"):
        strays.settle([fake], Trace([]), scene, lambda tensor: None, values)


def test_a_tuple_that_a_call_has_returned_is_seen_where_it_is_stored() -> None:
    """Who stores it holds the tuple once more, and not the tensors in it."""
    with FakeTensorMode():
        fake = torch.ones(2)
    entry = Entry(EntryKind.LEAF, result=(fake, 1), outputs=[((("item", 0),), fake)])
    trace, each = Trace([]), Instance()
    trace.start.following.append(entry)
    way = entry.way = Way(0, [entry], Graph())
    scene: Any = types.SimpleNamespace(hidden=set(), slots={})
    strays.watch(way, trace, scene)
    strays.count(trace)
    assert strays.suspects(way) == []
    each.stored = entry.result
    found = strays.suspects(way)
    values = {id(fake): a_value()}
    (stored,) = strays.settle(found, trace, scene, lambda tensor: None, values)
    assert stored.close()
    assert entry.result[0] is fake
    stored.fill({0: torch.ones(2)})
    assert torch.equal(each.stored[0], torch.ones(2))
    assert each.stored[1] == 1


def test_a_generator_holds_what_it_waits_with_and_nothing_while_it_runs() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)

    def names() -> list[str]:
        return [each.name for each in places_of({id(fake): fake}, frozenset())]

    def holding(tensor: torch.Tensor) -> Iterator[list[str]]:
        yield names()
        yield []
        del tensor

    generator = holding(fake)
    assert "a generator" not in next(generator)
    assert "a generator" in names()
