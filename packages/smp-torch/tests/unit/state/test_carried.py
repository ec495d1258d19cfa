"""What is in objects that recorded code hands to modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.torch.state.contents import (
    Contents,
    copied,
    same_in_objects,
    state_of,
    tensors_held,
)
from smdistributed.modelparallel.torch.state.elsewhere import fits, outline_of
from smdistributed.modelparallel.torch.tensors.nested import same


class Layer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.numbers = [torch.zeros(1)] * 300
        self.size = 1


class Cache(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__(first=Layer(), plain={"a": 1, "b": None})
        self.layers = [Layer(), Layer()]


class Holder:
    def __init__(self) -> None:
        self.cache = Cache()
        self.layers = [Layer(), Layer()]
        self.flag: object = False


def _renamed(holder: Holder) -> None:
    holder.layers[0].__dict__["other"] = holder.layers[0].__dict__.pop("size")


def _in_another_order(holder: Holder) -> None:
    holder.cache["first"] = holder.cache.pop("first")


def _other_dict(holder: Holder) -> None:
    holder.layers[1].__dict__ = {**vars(holder.layers[1]), "size": 2}


CHANGES: dict[str, Callable[[Holder], object]] = {
    "an attribute": lambda holder: setattr(holder.layers[1], "keys", torch.ones(1)),
    "an equal value of another type": lambda holder: setattr(holder.layers[0], "size", 1.0),
    "a new attribute": lambda holder: setattr(holder.layers[0], "new", None),
    "a value that is gone": lambda holder: delattr(holder.layers[0], "size"),
    "a name": _renamed,
    "an order": _in_another_order,
    "all attributes": _other_dict,
    "an item": lambda holder: holder.cache["plain"].update(b=2),
    "one item for another": lambda holder: holder.layers.reverse(),
    "an item more": lambda holder: holder.layers.append(Layer()),
    "an item of many": lambda holder: holder.layers[0].numbers.__setitem__(299, torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_in_or_taken_out_is_seen(change: str) -> None:
    holder, other = Holder(), Holder()
    contents, others = Contents(holder), Contents(other)
    assert contents.is_current()
    CHANGES[change](holder)
    assert not contents.is_current()
    others.apply(contents.effects())
    assert others.is_current()
    # The other one has become like it, and is followed further.
    assert str(_plain(other)) == str(_plain(holder))
    holder.flag = other.flag = True
    assert not others.is_current()


def _plain(obj: Any, depth: int = 4) -> Any:
    if isinstance(obj, dict):
        return [(key, _plain(each, depth - 1)) for key, each in obj.items()]
    if isinstance(obj, list):
        return [_plain(each, depth - 1) for each in obj]
    if hasattr(obj, "__dict__") and not isinstance(obj, torch.Tensor):
        return _plain(vars(obj), depth - 1)
    return obj


def test_tensors_are_found_in_slots_sets_and_attributes_of_containers() -> None:
    class Slots:
        __slots__ = ("kept",)

    class Rows(list[torch.Tensor]):
        pass

    one, two, three, four = torch.ones(4)
    slots, rows = Slots(), Rows([two])
    slots.kept, rows.seen = {one}, {"last": three}  # type: ignore[attr-defined]
    found = [*tensors_held(slots), *tensors_held(rows), *tensors_held(frozenset([four]))]
    assert all(each is want for each, want in zip(found, (one, two, three, four), strict=True))


class Linked:
    def __init__(self, before: Linked | None, number: float) -> None:
        self.before, self.kept = before, torch.full((2,), number)
        self.all: list[Linked] = [] if before is None else before.all
        self.all.append(self)


def test_objects_that_know_each_other_are_looked_at_once() -> None:
    last: Linked | None = None
    for number in range(60):
        last = Linked(last, number)
    assert last is not None
    # Each knows all others: to look at them by every way would take hours.
    assert len(list(tensors_held(last))) == 60
    before, other = state_of(last), copied(last)
    assert same(before, state_of(last), same_in_objects)
    assert before[0] is Linked
    assert fits(outline_of(last), other)
    other.all[7].kept = torch.zeros(3)
    assert not fits(outline_of(last), other)
