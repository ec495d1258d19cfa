"""What is in an object, and in all containers and objects in it; what has changed is seen.

What was done to one object can be done to another one like it.
"""

from __future__ import annotations

import collections
import copy
import enum
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from smdistributed.modelparallel.common.containers import attributes_of, slots_in
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.state.buffers import is_buffer, numbers_of, put_numbers
from smdistributed.modelparallel.torch.state.identities import Identities
from smdistributed.modelparallel.torch.tensors.nested import is_plain_value

_Held = TypeVar("_Held")
_WITHOUT_TENSORS = (type, torch.nn.Module, str, bytes, range, int, float, type(None))
#: How far objects in objects are looked into; one that was come to before is not, again.
_DEPTH = 8


def state_of(obj: Any, depth: int = _DEPTH, seen: dict[int, int] | None = None) -> Any:
    """Returns what is in an object, as plain data: it stays when the object changes."""
    if isinstance(obj, torch.Tensor) or is_plain_value(obj) or not depth:
        return obj
    if is_buffer(obj):
        return type(obj), numbers_of(obj), ()
    if type(obj).__module__ == "numpy" and hasattr(obj, "tobytes"):
        return type(obj), obj.tobytes(), ()
    is_container = isinstance(obj, Mapping | list | tuple | set | frozenset | collections.deque)
    if not is_container and (isinstance(obj, type | torch.nn.Module) or callable(obj)):
        return obj
    seen = {} if seen is None else seen
    if id(obj) in seen:
        return type(obj), seen[id(obj)], ()
    if not isinstance(obj, tuple | frozenset):  # equal ones may be one, or not
        seen[id(obj)] = len(seen)
    items: Any = ()
    if isinstance(obj, Mapping):
        items = [(key, state_of(item, depth - 1, seen)) for key, item in obj.items()]
    elif is_container:
        items = [state_of(item, depth - 1, seen) for item in obj]
    attributes = attributes_of(obj).items()
    return type(obj), items, [(name, state_of(item, depth - 1, seen)) for name, item in attributes]


def copied(obj: Any) -> Any:
    """Returns a copy of an object, with the same tensors in it."""
    return copy.deepcopy(obj, {id(tensor): tensor for tensor in tensors_held(obj)})


def tensors_held(obj: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in the attributes of an object, and in containers and objects in them."""
    return _held(obj, torch.Tensor)


def _held(obj: Any, kind: type[_Held]) -> Iterator[_Held]:
    """Yields what is of a class in an object, and in containers and objects in it."""
    seen: dict[int, Any] = {}
    pending = [obj]
    while pending:
        obj = pending.pop()
        if isinstance(obj, kind):
            yield obj
        elif id(obj) not in seen and not isinstance(obj, _WITHOUT_TENSORS):
            seen[id(obj)] = obj
            items: Any = obj.values() if isinstance(obj, Mapping) else ()
            if isinstance(obj, Sequence | Set):
                items = obj
            pending += reversed([*items, *attributes_of(obj).values()])


def same_in_objects(want: Any, got: Any) -> bool:
    """Compares what is in objects and no plain value: tensors with the same content are alike."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return want is got
    if isinstance(want, FakeTensor) or isinstance(got, FakeTensor) or want.shape != got.shape:
        return False
    with past_recording():
        return want.dtype == got.dtype and torch.equal(want, got)


#: How one is reached: the way to what it is in, and its key there; None: it is the first.
_Way = tuple["_Way", Any] | None
_SEQUENCES = (list, set, collections.deque)
_CONTAINERS = (dict, *_SEQUENCES)


class Opaque:
    """What nobody looks into: it stands for what has no contents."""

    __slots__ = ()


_WITHOUT_CONTENTS = (Opaque, torch.Tensor, bool, int, float, str, type(None), torch.nn.Module, type)
#: Of the objects and containers in an object, those that have changed: place in the order, items.
Effects = Sequence[tuple[int, dict[Any, Any]]]


class Contents:
    """The containers and objects in an object, in an order that another one like it has too.

    Args:
        obj: the object.
        but_for: identities of objects in it that are not looked into.

    Attributes:
        obj: as given.
    """

    def __init__(self, obj: Any, but_for: Collection[int] = ()) -> None:
        self.obj = obj
        self._but_for = but_for
        self._look()

    def _look(self) -> None:
        self._nodes, self._ways = walked(self.obj, self._but_for)
        self._places = {id(node): place for place, node in enumerate(self._nodes)}
        self._before = [items_of(node) for node in self._nodes]
        self._buffers = [place for place, node in enumerate(self._nodes) if is_buffer(node)]
        dicts = [node for node in self._nodes if isinstance(node, dict)]
        named = [node for node in self._nodes if hasattr(node, "__dict__")]
        sequences = [node for node in self._nodes if isinstance(node, _SEQUENCES)]
        slots = [
            (node, name)
            for node in self._nodes
            for name in _slots(type(node)).keys() & items_of(node).keys()
        ]
        # In one go over all: a cache of Transformers has an object for each layer, and each layer
        # is given it.
        self._identities = Identities(
            [*dicts, *map(vars, named)],
            sequences,
            [*((node, "__dict__") for node in named), *slots],
        )
        of_one_kind = collections.Counter(map(id, [*dicts, *named, *sequences]))
        of_one_kind.update(id(node) for node, _ in slots)
        #: Where they stand there, of those that stand in one place.
        self._numbers = {
            self._places[id(node)]: number
            for number, node in enumerate([*dicts, *named, *sequences])
            if of_one_kind[id(node)] == 1
        }

    def is_current(self) -> bool:
        """Whether nothing has been put into them, or taken out, since."""
        return self._identities.are_current() and all(
            same_items(self._before[place], items_of(self._nodes[place])) for place in self._buffers
        )

    def changed(self) -> list[Any]:
        """Returns those into which something has been put since, or out of which it was taken."""
        return [
            node
            for node, before in zip(self._nodes, self._before, strict=True)
            if not same_items(before, items_of(node))
        ]

    def at(self, place: int) -> Any:
        """Returns the one at a place in the order."""
        return self._nodes[place]

    def way_to(self, node: Any) -> list[Any] | None:
        """Returns the keys by which one is reached; see ``reached``. None: it is not in them."""
        if id(node) not in self._places:
            return None
        keys, way = [], self._ways[self._places[id(node)]]
        while way is not None:
            way, key = way
            keys.append(key)
        return keys[::-1]

    def effects(self, written: Collection[int] = ()) -> Effects:
        """Returns what has been put into them since; new objects as copies.

        Args:
            written: the memory of tensors that something has been written to since.
        """
        former = {
            id(item): _Former(place, key)
            for place, before in enumerate(self._before)
            for key, item in before.items()
            if isinstance(item, torch.Tensor | float) and not _is_in(written, item)
        }
        found = enumerate(map(items_of, self._nodes))
        return [
            (place, {key: self._told(item, former) for key, item in items.items()})
            for place, items in found
            if not same_items(self._before[place], items)
            or any(_is_in(written, each) for each in items.values())
        ]

    def apply(self, effects: Effects) -> None:
        """Does to these what was done to others like them."""
        nodes, is_moved = self._nodes, False
        everything = [
            (place, {key: self.meant(item) for key, item in items.items()})
            for place, items in effects
        ]
        for place, found in everything:
            before = self._before[place]
            refill(nodes[place], found)
            is_moved = is_moved or place not in self._numbers or _inner(before) != _inner(found)
            if not is_moved:
                self._before[place] = found
                self._identities.note(self._numbers[place])
        if is_moved:
            self._look()  # they have another order now, as they have in all others like these

    def nodes(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """Yields the containers and objects, and what was in each when they were looked at."""
        yield from zip(self._nodes, self._before, strict=True)

    def _told(self, item: Any, former: Mapping[int, _Former]) -> Any:
        if id(item) in self._places:
            return _Place(self._places[id(item)])
        if id(item) in former:
            return former[id(item)]
        if not _has_contents(item) and not isinstance(item, tuple):
            return item
        known: dict[int, Any] = {id(each): each for each in tensors_held(item)} | dict(former)
        return copy.deepcopy(item, known | {key: _Place(n) for key, n in self._places.items()})

    def meant(self, item: Any) -> Any:
        """Returns what an item of effects stands for in these."""
        if isinstance(item, _Place):
            return self._nodes[item.place]
        if isinstance(item, _Former):
            return self._before[item.place][item.key]
        if not _has_contents(item) and not isinstance(item, tuple):
            return item
        known: dict[int, Any] = {id(each): each for each in tensors_held(item)}
        known |= {id(each): self.meant(each) for each in _held(item, Reference)}
        return copy.deepcopy(item, known)


class Reference(Opaque):
    """Stands in effects for what was there already."""

    __slots__ = ()

    def is_what_was_at(self, place: int, key: Any) -> bool:
        """Whether it stands for the tensor or number that was in the one at a place."""
        return self == _Former(place, key)


@dataclass(frozen=True, slots=True)
class _Place(Reference):
    """The container or object at a place in the order."""

    place: int


@dataclass(frozen=True, slots=True)
class _Former(Reference):
    """A tensor or number that was in the one at a place."""

    place: int
    key: Any


class _Attribute(NamedTuple):
    """The name of an attribute among the keys of what a container has."""

    name: str


def _has_contents(obj: Any) -> bool:
    if isinstance(obj, _WITHOUT_CONTENTS):
        return False
    if isinstance(obj, _CONTAINERS) or is_buffer(obj):
        return True
    return not callable(obj) and not is_plain_value(obj) and has_attributes(obj)


class _OfBuffers(enum.Enum):
    """The key of all that is in a buffer."""

    NUMBERS = enum.auto()


def _is_in(memory: Collection[int], item: Any) -> bool:
    if not memory or not isinstance(item, torch.Tensor) or item.layout is not torch.strided:
        return False
    return storage_of(item) in memory


def _inner(items: Mapping[Any, Any]) -> list[int]:
    """Returns the containers and objects among items, those in tuples too, by identity."""
    pending, found = [*items.values()], []
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            pending += item
        elif _has_contents(item):
            found.append(id(item))
    return found


def items_of(obj: Any) -> dict[Any, Any]:
    """Returns what is in a container, by key or position, or the attributes of an object."""
    if is_buffer(obj):
        return {_OfBuffers.NUMBERS: numbers_of(obj)}
    if not isinstance(obj, _CONTAINERS):
        return dict(own_attributes(obj))
    if isinstance(obj, collections.OrderedDict):
        items = dict(collections.OrderedDict.items(obj))  # in its own order
    else:
        items = dict(dict.items(obj)) if isinstance(obj, dict) else dict(enumerate(obj))
    if type(obj) not in _CONTAINERS:
        items |= {_Attribute(name): item for name, item in attributes_of(obj).items()}
    return items


def same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two have the very same items, in one order; of numbers equal ones."""
    if _OfBuffers.NUMBERS in one:
        return one == other
    return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))


def walked(obj: Any, but_for: Collection[int] = ()) -> tuple[list[Any], list[_Way]]:
    """Returns the containers and objects in an object, each once, and how they are reached.

    The order is the same for another object like it; so sets, which have none, are not gone into.
    """
    nodes: list[Any] = []
    ways: list[_Way] = []
    seen = set(but_for)
    pending: list[tuple[Any, _Way]] = [(obj, None)]
    while pending:
        obj, way = pending.pop()
        if isinstance(obj, tuple):
            pending += [(item, (way, key)) for key, item in enumerate(obj)]
        elif _has_contents(obj) and id(obj) not in seen:
            seen.add(id(obj))
            nodes.append(obj)
            ways.append(way)
            if not isinstance(obj, set):
                pending += [(item, (way, key)) for key, item in items_of(obj).items()]
    return nodes, ways


def reached(obj: Any, way: Iterable[Any]) -> Any:
    """Returns what is in an object at the end of a way.

    Raises:
        LookupError: there is nothing there.
    """
    for key in way:
        if isinstance(obj, dict | set) or isinstance(key, _Attribute):
            obj = items_of(obj)[key]
        elif isinstance(obj, tuple | list | collections.deque):
            obj = obj[key]
        else:
            obj = own_attributes(obj)[key]
    return obj


def refill(obj: Any, items: dict[Any, Any]) -> None:
    """Has a container or object contain these items, and nothing else."""
    if is_buffer(obj):
        put_numbers(obj, items[_OfBuffers.NUMBERS])
        return
    if not isinstance(obj, _CONTAINERS):
        _refill_attributes(obj, items)
        return
    entries = items
    if type(obj) not in _CONTAINERS:
        attributes = {key.name: items[key] for key in items if isinstance(key, _Attribute)}
        _refill_attributes(obj, attributes)
        entries = {key: items[key] for key in items if not isinstance(key, _Attribute)}
    # Past what a subclass makes of it.
    kinds = (collections.OrderedDict, *_CONTAINERS)
    kind: Any = next(kind for kind in kinds if isinstance(obj, kind))
    kind.clear(obj)
    put_in = kind.update if issubclass(kind, dict | set) else kind.extend
    put_in(obj, entries if issubclass(kind, dict) else entries.values())


def _refill_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    slots = _slots(type(obj))
    for name, slot in slots.items():
        if name in attributes:
            slot.__set__(obj, attributes[name])
        elif hasattr(obj, name):
            slot.__delete__(obj)
    if hasattr(obj, "__dict__"):
        vars(obj).clear()
        vars(obj).update((key, each) for key, each in attributes.items() if key not in slots)


def has_attributes(obj: Any) -> bool:
    """Whether an instance can have attributes of its own."""
    return hasattr(obj, "__dict__") or bool(_slots(type(obj)))


def own_attributes(obj: Any) -> Mapping[str, Any]:
    """Returns the attributes that an instance has of its own; not for what has none at all."""
    return attributes_of(obj) if _slots(type(obj)) else vars(obj)


def _slots(kind: type) -> dict[str, Any]:
    """Returns the slots that instances of a class have, by name."""
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = {slot.__name__: slot for slot in reversed([*slots_in(kind)])}
    return found


#: By class: many objects of a few are looked at time and again.
_SLOTS: dict[type, dict[str, Any]] = {}
