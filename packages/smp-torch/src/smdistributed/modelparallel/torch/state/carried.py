"""Objects with state of their own that recorded code hands to modules: a cache, say.

A module may change such an object, and later modules see it. Ranks have no common memory, so each
gets a copy of the object as it was when it was first handed over, for each microbatch, and its
modules share that. What modules of other ranks do to the object is done to the copy, too, when its
turn comes: with stand-ins for tensors, which are there and not here (``elsewhere.py``). While the
step is recorded, each module runs once on the object itself and once on such a copy: if it does not
do the same, it depends on what another rank's modules left in the object, and that is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions, unseen
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.state.contents import (
    Contents,
    Effects,
    Reference,
    copied,
    items_of,
    reached,
    same_items,
    state_of,
    tensors_held,
    walked,
)
from smdistributed.modelparallel.torch.state.elsewhere import as_elsewhere, fits, outline_of
from smdistributed.modelparallel.torch.tensors.writes import writes_of


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
        with past_subclass_functions():
            wholes = _wholes(held)
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
        #: Of those that see the memory of another one: which, and how.
        self._views = {
            id(each): (id(whole), (each.shape, each.stride(), each.storage_offset()))
            for each in held
            if (whole := wholes.get(id(each))) is not None
        }
        self.pristine = copied(obj)

    def __repr__(self) -> str:
        return f"object {self.index} of class {type(self.pristine).__name__}"

    def stand_in(self) -> Any:
        """Returns the object for one rank in the recording."""
        return copied(self.pristine)

    def copy(self, grown: Any = None) -> Any:
        """Returns the object for one rank and microbatch.

        Args:
            grown: a copy of the pristine one to which something has been done.
        """
        constants = {
            key: real.clone() for key, real in self._constants.items() if key not in self._views
        }
        for key, (whole, view) in self._views.items():
            constants[key] = constants[whole].as_strided(*view)
        return copy.deepcopy(self.pristine if grown is None else grown, constants)


def _wholes(held: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns, by the identities of tensors that see others' memory, those that have all of it."""
    wholes = {
        (storage_of(each), each.dtype): each
        for each in held
        if each.layout is torch.strided
        and each.is_contiguous()
        and 0 < each.numel() * each.itemsize == each.untyped_storage().nbytes()
    }
    found = {
        id(each): wholes.get((storage_of(each), each.dtype))
        for each in held
        if each.layout is torch.strided
    }
    return {key: whole for key, whole in found.items() if whole is not None and id(whole) != key}


class Left(NamedTuple):
    """What a module has left in a container or object that it changes.

    Attributes:
        way: to it.
        outline: of what is in it.
        kept: the keys of tensors in it that were there before.
    """

    way: list[Any]
    outline: Any
    kept: frozenset[Any]


class Deed(NamedTuple):
    """What a module does to an object.

    Attributes:
        node: the number of its call.
        name: of the module.
        effects: what it does, as ranks see it that do not run it.
        left: what it leaves.
    """

    node: int
    name: str
    effects: Effects
    left: list[Left]


class History:
    """What the modules of a microbatch do to an object, in the order of their calls.

    Args:
        carried: the object.
    """

    def __init__(self, carried: Carried) -> None:
        self.carried = carried
        self.deeds: list[Deed] = []
        self._contents = Contents(carried.stand_in())
        self._grown: dict[int, Any] = {}

    def add(self, node: int, name: str, effects: Effects) -> None:
        """Adds what a module does.

        Args:
            node: the number of its call.
            name: of the module.
            effects: what it does.
        """
        kind = type(self.carried.pristine).__qualname__
        where = f"{name} has left in an object of class {kind}, on another partition"
        contents = self._contents
        seen = as_elsewhere(effects, contents, where)
        changed = [(contents.at(place), _kept(contents, place, items)) for place, items in effects]
        contents.apply(seen)
        left = [
            Left(way, outline_of(one), kept)
            for one, kept in changed
            if (way := contents.way_to(one)) is not None
        ]
        self.deeds.append(Deed(node, name, seen, left))

    def grown(self, count: int) -> Any:
        """Returns the object as it is after the first ones, for ranks that do none of them."""
        if count not in self._grown:
            contents = Contents(self.carried.stand_in())
            for deed in self.deeds[:count]:
                contents.apply(deed.effects)
            self._grown[count] = contents.obj
        return self._grown[count]


def _kept(contents: Contents, place: int, items: dict[Any, Any]) -> frozenset[Any]:
    return frozenset(
        key
        for key, item in items.items()
        if isinstance(item, Reference)
        and item.is_what_was_at(place, key)
        and isinstance(contents.meant(item), torch.Tensor)
    )


class CarriedObjects:
    """The copies of one rank for one microbatch."""

    def __init__(self) -> None:
        self._copies: dict[Carried, Any] = {}
        self._num_done: dict[Carried, int] = {}
        self._watches: dict[Carried, Watch] = {}

    def clear(self) -> None:
        """Lets go of the copies: no module of this rank sees them again."""
        self._copies.clear()
        self._num_done.clear()
        self._watches.clear()

    def each_time(self) -> Iterator[CarriedObjects]:
        """Yields what a checkpointed call is given: these; when it comes again, as they are now."""
        kept = self._as_they_are()
        yield self
        while True:
            yield kept._as_they_are()

    def _as_they_are(self) -> CarriedObjects:
        found = CarriedObjects()
        found._copies = {carried: copied(each) for carried, each in self._copies.items()}
        found._num_done = dict(self._num_done)
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors in the copies."""
        for each in self._copies.values():
            yield from tensors_held(each)

    def of(self, history: History, node: int, *, is_told: bool) -> Any:
        """Returns the copy that the rank's modules share, as one of them finds it.

        Args:
            history: of the object.
            node: the number of the module's call.
            is_told: modules of other ranks are given the object later.
        """
        carried, deeds = history.carried, history.deeds
        first = self._num_done.get(carried, 0)
        end = first
        while end < len(deeds) and deeds[end].node < node:
            end += 1
        if carried not in self._copies:
            self._copies[carried] = carried.copy(history.grown(end))
        elif end > first:
            contents = Contents(self._copies[carried])
            for deed in deeds[first:end]:
                contents.apply(deed.effects)
        # What the module itself does is done by its call.
        is_own = end < len(deeds) and deeds[end].node == node
        self._num_done[carried] = end + is_own
        if is_told and carried not in self._watches:
            with unseen():
                self._watches[carried] = Watch(self._copies[carried])
        return self._copies[carried]

    def check(self, history: History, node: int) -> None:
        """Makes sure that a module has left in an object what others take it to have.

        Raises:
            UnsupportedError: it is something else than when its microbatch was recorded.
        """
        deed = next(each for each in history.deeds if each.node == node)
        with unseen():
            if not self._watches[history.carried].takes(deed):
                raise _other_things(f"{deed.name} leaves", history)

    def settle(self, histories: Sequence[History], names: str) -> None:
        """Makes sure that modules have left nothing in objects beside what others know of.

        Args:
            histories: of objects that modules of other ranks are given later.
            names: of the modules that were given them.

        Raises:
            UnsupportedError: they have.
        """
        for history in histories:
            watch = self._watches.pop(history.carried)
            with unseen():
                if not watch.is_all_told():
                    raise _other_things(f"a module ({names}) leaves", history)


class Watch:
    """What the modules of a segment do to a copy of an object.

    Args:
        obj: the copy, before the first of them.
    """

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        nodes, _ = walked(obj)
        #: By identity: containers and objects, and what was in each before the module that runs.
        self._before = {id(node): (node, items_of(node)) for node in nodes}
        #: Tensors that nothing has been told of, with what they are after a write.
        self._written = [
            (node, key, item, writes_of(item))
            for node, items in self._before.values()
            for key, item in items.items()
            if type(item) is torch.Tensor
        ]
        #: By identity of what the modules have changed, the keys of what they have kept in it.
        self._told: dict[int, frozenset[Any]] = {}

    def takes(self, deed: Deed) -> bool:
        """Takes note of what a module has done; returns whether it did what was recorded."""
        return all(map(self._takes, deed.left))

    def _takes(self, left: Left) -> bool:
        try:
            node = reached(self._obj, left.way)
        except LookupError:
            return False
        _, before = self._before.get(id(node), (None, {}))
        now = items_of(node)
        kept = left.kept if id(node) in self._before else frozenset()
        self._before[id(node)] = node, now
        self._told[id(node)] = kept & self._told.get(id(node), kept)
        return fits(left.outline, node) and all(now.get(key) is before.get(key) for key in kept)

    def is_all_told(self) -> bool:
        """Whether nothing is changed but what modules are known to change."""
        return all(
            same_items(before, items_of(node)) for node, before in self._before.values()
        ) and all(
            writes_of(tensor) == writes
            or (id(node) in self._told and key not in self._told[id(node)])
            for node, key, tensor, writes in self._written
        )


def _other_things(who: str, history: History) -> UnsupportedError:
    return UnsupportedError(
        f"{who} something else in an object of class {type(history.carried.pristine).__qualname__} "
        "than when the call was recorded, and modules of another partition are given the object, "
        "too: they would not find it. Let it leave the same things in each call with such "
        "arguments, or put the modules that share it on one partition."
    )
