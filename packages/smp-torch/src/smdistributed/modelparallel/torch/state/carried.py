"""Objects with state of their own that recorded code hands to modules: a cache, say.

A module may change such an object, and later modules see it. Ranks have no common memory, so each
gets a copy of the object as it was when it was first handed over, for each microbatch, and its
modules share that. While the step is recorded, each module runs once on the object itself and once
on the copy of its rank: if it does not do the same, it depends on what another rank's modules left
in the object, and that is refused.
"""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.common.containers import attributes_of
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.state.identities import Identities
from smdistributed.modelparallel.torch.tensors.nested import is_plain_value


class Carried:
    """Stands in templates for an object with state.

    Args:
        index: position among the carried objects of the graph.
        obj: the object as it is first handed over. Tensors that it holds must be the same in every
            microbatch; they are not copied for the recording.
        constant: gives the real tensor for one of them, or None where it depends on the microbatch.
        where: who hands it over, for messages.

    Attributes:
        index: as given.
        pristine: a copy of the object, for the recording.
        state: what was in it, as plain data.
        problem: why it cannot be handed over, if it cannot: it holds tensors that depend on the
            microbatch.
    """

    def __init__(
        self,
        index: int,
        obj: Any,
        constant: Callable[[torch.Tensor], torch.Tensor | None],
        where: str,
    ) -> None:
        self.index = index
        self.state = state_of(obj)
        self.problem: UnsupportedError | None = None
        self._constants: dict[int, torch.Tensor] = {}
        held = list(tensors_held(obj))
        for tensor in held:
            real = constant(tensor)
            if real is None:
                self.problem = UnsupportedError(
                    f"{where} passes an object of class {type(obj).__module__}."
                    f"{type(obj).__qualname__} that holds activations between partitions; only "
                    "tensors, containers of tensors and plain constants can be passed. Keep the "
                    "object inside one module, or put the modules that share it on one partition."
                )
            else:
                self._constants[id(tensor)] = real
        self.pristine = copied(obj)

    def __repr__(self) -> str:
        return f"object {self.index} of class {type(self.pristine).__name__}"

    def stand_in(self) -> Any:
        """Returns the object for one rank in the recording."""
        return copied(self.pristine)

    def copy(self) -> Any:
        """Returns the object for one rank and microbatch."""
        constants = {key: tensor.clone() for key, tensor in self._constants.items()}
        return copy.deepcopy(self.pristine, constants)


class CarriedObjects:
    """The copies of one rank for one microbatch.

    Args:
        make: gives a new copy.
    """

    def __init__(self, make: Callable[[Carried], Any]) -> None:
        self._make = make
        self._copies: dict[Carried, Any] = {}

    def clear(self) -> None:
        """Lets go of the copies: no module of this rank sees them again."""
        self._copies.clear()

    def put_back(self, copies: Mapping[Carried, Any]) -> None:
        """Has objects be copies that were made before they were changed."""
        self._copies.update(copies)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors in the copies."""
        for each in self._copies.values():
            yield from tensors_held(each)

    def __call__(self, carried: Carried) -> Any:
        """Returns the copy that the rank's modules share."""
        if carried not in self._copies:
            self._copies[carried] = self._make(carried)
        return self._copies[carried]


def state_of(obj: Any, depth: int = 8) -> Any:
    """Returns what is in an object, as plain data: it stays when the object changes."""
    if isinstance(obj, torch.Tensor) or is_plain_value(obj) or not depth:
        return obj
    if isinstance(obj, Mapping):
        items: Any = [(key, state_of(item, depth - 1)) for key, item in obj.items()]
        return type(obj), items, _attributes(obj, depth)
    if isinstance(obj, list | tuple | set | frozenset | collections.deque):
        return type(obj), [state_of(item, depth - 1) for item in obj], _attributes(obj, depth)
    if type(obj).__module__ == "numpy" and hasattr(obj, "tobytes"):
        return type(obj), obj.tobytes(), ()
    if isinstance(obj, type | torch.nn.Module) or callable(obj):
        return obj
    return type(obj), (), _attributes(obj, depth)


def _attributes(obj: Any, depth: int) -> Any:
    return [(name, state_of(item, depth - 1)) for name, item in attributes_of(obj).items()]


def copied(obj: Any) -> Any:
    """Returns a copy of an object, with the same tensors in it."""
    return copy.deepcopy(obj, {id(tensor): tensor for tensor in tensors_held(obj)})


def same_in_objects(want: Any, got: Any) -> bool:
    """Compares what is in objects and no plain value: tensors with the same content are alike."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return want is got
    if isinstance(want, FakeTensor) or isinstance(got, FakeTensor) or want.shape != got.shape:
        return False
    with past_recording():
        return want.dtype == got.dtype and torch.equal(want, got)


_PLAIN = (dict, list)
_WITHOUT_CONTENTS = (torch.Tensor, bool, int, float, str, type(None), torch.nn.Module, type)


class Contents:
    """The containers and objects in an object, in an order that another one like it has too.

    Args:
        obj: the object.
    """

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self._look()

    def _look(self) -> None:
        self._nodes: list[Any] = []
        self._places: dict[int, int] = {}
        pending = [self._obj]
        while pending:
            obj = pending.pop()
            if _has_contents(obj) and id(obj) not in self._places:
                self._places[id(obj)] = len(self._nodes)
                self._nodes.append(obj)
                pending += _items(obj).values()
        self._before = [_items(node) for node in self._nodes]
        # In one go over all: a cache of Transformers has an object for each layer, and each layer
        # is given it.
        lists = {place: node for place, node in enumerate(self._nodes) if isinstance(node, list)}
        rest = {place: node for place, node in enumerate(self._nodes) if place not in lists}
        self._numbers = {place: number for number, place in enumerate([*rest, *lists])}
        self._identities = Identities(
            [each if isinstance(each, dict) else vars(each) for each in rest.values()],
            lists.values(),
            [(each, "__dict__") for each in rest.values() if not isinstance(each, dict)],
        )

    def is_current(self) -> bool:
        """Whether nothing has been put into them, or taken out, since."""
        return self._identities.are_current()

    def effects(self) -> list[tuple[int, dict[Any, Any]]]:
        """Returns what has been put into them since; new objects as copies.

        Returns:
            for each that has changed its place in the order, and its items.
        """
        return [
            (place, {key: self._kept(item) for key, item in _items(node).items()})
            for place, (node, before) in enumerate(zip(self._nodes, self._before, strict=True))
            if not _same_items(before, _items(node))
        ]

    def apply(self, effects: Sequence[tuple[int, dict[Any, Any]]]) -> None:
        """Does to these what was done to others like them."""
        nodes, is_new = self._nodes, False
        for place, items in effects:
            found = {
                key: nodes[item.place] if isinstance(item, _Place) else _own(item)
                for key, item in items.items()
            }
            _refill(nodes[place], found)
            self._before[place] = found
            self._identities.note(self._numbers[place])
            is_new = is_new or any(
                id(each) not in self._places and _has_contents(each) for each in found.values()
            )
        if is_new:
            self._look()

    def _kept(self, item: Any) -> Any:
        place = self._places.get(id(item))
        return _own(item) if place is None else _Place(place)


class _Place(NamedTuple):
    """Stands for the container or object at a place in the order."""

    place: int


def _has_contents(obj: Any) -> bool:
    if isinstance(obj, _WITHOUT_CONTENTS):
        return False
    return isinstance(obj, _PLAIN) or (
        not callable(obj) and not is_plain_value(obj) and hasattr(obj, "__dict__")
    )


def _own(item: Any) -> Any:
    return copied(item) if _has_contents(item) or isinstance(item, set | tuple) else item


def _items(obj: Any) -> dict[Any, Any]:
    if isinstance(obj, dict):
        return dict(dict.items(obj))
    return dict(enumerate(obj)) if isinstance(obj, list) else dict(vars(obj))


def _same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))


def _refill(obj: Any, items: dict[Any, Any]) -> None:
    if isinstance(obj, list):
        obj[:] = items.values()
        return
    entries = obj if isinstance(obj, dict) else vars(obj)
    dict.clear(entries)
    dict.update(entries, items)


def tensors_held(obj: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Yields the tensors in the attributes of an object, and in containers and objects in them."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif depth and not isinstance(obj, type | torch.nn.Module | str | bytes):
        items: Any = obj.values() if isinstance(obj, Mapping) else ()
        if isinstance(obj, Sequence | Set):
            items = obj
        for item in (*items, *attributes_of(obj).values()):
            yield from tensors_held(item, depth - 1)
