"""Comparing the objects in many places in one go."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from torch import nn

from smdistributed.modelparallel.torch.state.identities import Identities
from smdistributed.modelparallel.torch.state.snapshot import Snapshot


class Kept:
    """An object with attributes."""

    slot: int

    def __init__(self) -> None:
        self.one, self.other = object(), object()


def cell(value: object) -> types.CellType:
    return types.CellType(value)


class Places:
    """A place of each kind."""

    def __init__(self) -> None:
        self.plain = {"a": object(), "b": object()}
        self.ordered = collections.OrderedDict(a=object(), b=object())
        self.kind = type("Kind", (), {"a": object()})
        self.listed = [object(), object()]
        self.queue = collections.deque([object()])
        self.kept = Kept()
        self.cell = cell(object())
        self.entries = {"c": object(), "unseen": object()}

    def identities(self) -> Identities:
        return Identities(
            [self.plain, self.ordered, vars(self.kind)],
            [self.listed, self.queue],
            [(self.kept, "one"), (self.cell, "cell_contents")],
            [(self.entries, "c")],
        )


def renamed(entries: dict[str, Any]) -> None:
    entries["z"] = entries.pop("b")


def turned(entries: dict[str, Any]) -> None:
    entries["a"] = entries.pop("a")


def emptied(place: types.CellType) -> None:
    del place.cell_contents


CHANGES: dict[str, Callable[[Places], object]] = {
    "value": lambda it: it.plain.update(b=object()),
    "added": lambda it: it.plain.update(c=object()),
    "removed": lambda it: it.plain.pop("b"),
    "emptied": lambda it: it.plain.clear(),
    "renamed": lambda it: renamed(it.plain),
    "order": lambda it: turned(it.plain),
    "moved to another": lambda it: it.ordered.update(c=it.plain.pop("b")),
    "ordered value": lambda it: it.ordered.update(a=object()),
    "ordered order": lambda it: it.ordered.move_to_end("a"),
    "class": lambda it: setattr(it.kind, "a", object()),
    "class added": lambda it: setattr(it.kind, "b", object()),
    "item": lambda it: it.listed.__setitem__(0, object()),
    "appended": lambda it: it.listed.append(object()),
    "reversed": lambda it: it.listed.reverse(),
    "from list to queue": lambda it: it.queue.appendleft(it.listed.pop()),
    "queue": lambda it: it.queue.append(object()),
    "attribute": lambda it: setattr(it.kept, "one", object()),
    "attribute gone": lambda it: delattr(it.kept, "one"),
    "cell": lambda it: setattr(it.cell, "cell_contents", object()),
    "cell empty": lambda it: emptied(it.cell),
    "entry": lambda it: it.entries.update(c=object()),
    "entry gone": lambda it: it.entries.pop("c"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    places = Places()
    identities = places.identities()
    assert identities.are_current()
    CHANGES[change](places)
    assert not identities.are_current()


def test_what_was_not_asked_for_is_not_seen() -> None:
    places = Places()
    identities = places.identities()
    places.kept.other = object()
    places.entries["unseen"] = object()
    assert identities.are_current()


def test_nothing_is_always_current() -> None:
    assert Identities().are_current()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_a_container_is_noted_anew(number: int, size: int) -> None:
    mappings: list[dict[object, object]] = [{1: object(), 2: object()}, {3: object()}]
    sequences = [[object()], [object(), object()]]
    identities = Identities(mappings, sequences)
    changed: Any = [*mappings, *sequences][number]
    new = [object() for _ in range(size)]
    changed.clear()
    if isinstance(changed, dict):
        changed.update(dict(enumerate(new)))
    else:
        changed.extend(new)
    assert not identities.are_current()
    identities.note(number)
    assert identities.are_current()
    for each in [*mappings, *sequences]:  # and all others are where they were
        if isinstance(each, dict):
            each["more"] = object()
        else:
            each.append(object())
        assert not identities.are_current()
        if isinstance(each, dict):
            del each["more"]
        else:
            each.pop()
        assert identities.are_current()


class Outer(nn.Module):
    """A module that sees a list, a class and a closure."""

    def __init__(self, kept: list[object], seen: Callable[[], object]) -> None:
        super().__init__()
        self.kept, self.seen = kept, seen


ARRAY = numpy.zeros(3)


def reads_an_array() -> object:
    return ARRAY.sum()


def test_what_is_compared_is_not_asked_whether_it_is_equal() -> None:
    snapshot = Snapshot((), [reads_an_array])
    assert not snapshot.differences()
    assert not snapshot.differences()
    ARRAY[0] += 1
    assert [each.holder.path for each in snapshot.differences()] == ["ARRAY"]


def test_a_snapshot_tells_differences_each_time_and_again_when_they_are_gone() -> None:
    shared = [1]

    def seen() -> object:
        return shared

    module = Outer(shared, seen)
    snapshot = Snapshot([module])
    for _ in range(3):
        assert not snapshot.differences()
        shared.append(2)
        found = snapshot.differences()
        assert [each.now for each in found] == [[1, 2]]
        assert snapshot.differences()  # it is told until it is gone
        shared.pop()
    assert not snapshot.differences()
    module.seen = lambda: None
    assert not snapshot.differences()  # modules' own attributes are looked at elsewhere
