"""Where objects are held: what the garbage collector finds, as places to read and to fill.

What a script reaches only by code in C, as the value of a context variable, is known from the
snapshots of what it can reach. A tuple cannot be filled: the place is where the tuple is.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from smdistributed.modelparallel.common.containers import slots_in
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.trace.tree import Constant, Entry
from smdistributed.modelparallel.torch.state.holders import Holder
from smdistributed.modelparallel.torch.state.identities import Identities

#: What runs, and what is the recording's and autograd's own.
_NOT_OF_SCRIPTS = (types.FrameType, Entry, FakeTensor, FunctionCtx, Constant)


class Place(NamedTuple):
    """A place that holds one of the objects that are looked for, or a tuple around some.

    Attributes:
        owner: the object, class or container that has it.
        key: which of its places.
        get: returns what is in it.
        put: puts something there; None if nothing can be put.
    """

    owner: Any
    key: Any
    get: Callable[[], Any]
    put: Callable[[Any], None] | None

    @property
    def name(self) -> str:
        """What it is called in messages."""
        if isinstance(self.owner, Holder):
            return self.owner.path
        kind = type(self.owner).__name__
        return f"{kind}.{self.key}" if isinstance(self.key, str) else f"a {kind}"


def places_of(wanted: Mapping[int, Any], apart_from: Set[int]) -> Iterator[Place]:
    """Yields the places of some objects.

    Args:
        wanted: the objects, by identity.
        apart_from: identities of holders that do not count.
    """
    objects = tuple(wanted.values())
    holders = gc.get_referrers(*objects)
    apart_from = apart_from | {id(holders), id(objects), id(wanted)}
    for holder in holders:
        if id(holder) in apart_from:
            continue
        if isinstance(holder, _NOT_OF_SCRIPTS) or _runs(holder) or _is_copy(holder):
            continue
        owner = _owner(holder)
        if not isinstance(owner, _NOT_OF_SCRIPTS):
            yield from _places(holder, owner, wanted, apart_from)


def places_in(rows: Sequence[Any], wanted: Mapping[int, Any]) -> Iterator[Place]:
    """Yields the places of some objects in lists, and of tuples around some.

    Args:
        rows: the lists, or deques.
        wanted: the objects, by identity.
    """
    for row in rows:
        tuples = {
            id(item): item
            for item in row
            if type(item) is tuple and any(id(each) in wanted for each in item)
        }
        yield from _places(row, row, {**wanted, **tuples}, frozenset())


def _runs(holder: Any) -> bool:
    """Whether a holder is a generator that runs: Python 3.12 shows no frame of these in here."""
    return isinstance(holder, types.GeneratorType) and holder.gi_running


def _is_copy(holder: Any) -> bool:
    """Whether a snapshot has copied what was in something: that is no place of the script's."""
    if not isinstance(holder, dict | list | tuple) or isinstance(holder, Holder):
        return False
    for each in gc.get_referrers(holder):
        if isinstance(each, Holder):
            if each.before is holder and each.read(each.obj) is not holder:
                return True
        elif isinstance(each, Identities) or (type(each) is tuple and _is_copy(each)):
            return True
    return False


def _places(
    holder: Any, owner: Any, wanted: Mapping[int, Any], apart_from: Set[int]
) -> Iterator[Place]:
    if isinstance(holder, Holder):
        # It knows of places that the garbage collector does not see.
        if id(holder.read(holder.obj)) in wanted:
            get = functools.partial(holder.read, holder.obj)
            put = holder.put_back and functools.partial(holder.put_back, holder.obj)
            yield Place(holder, holder.path, get, put)
    elif isinstance(owner, type):
        # Not into the dict: Python remembers what it has found in a class until that is told.
        for key, value in list(vars(owner).items()):
            if id(value) in wanted:
                put = functools.partial(type.__setattr__, owner, key)
                yield Place(owner, key, functools.partial(vars(owner).get, key), put)
    elif isinstance(holder, dict):
        for key, value in list(dict.items(holder)):
            if id(value) in wanted:
                put = functools.partial(dict.__setitem__, holder, key)
                yield Place(owner, key, functools.partial(dict.get, holder, key), put)
    elif isinstance(holder, list | collections.deque):
        for position, value in enumerate(list(holder)):
            if id(value) in wanted:
                put = functools.partial(holder.__setitem__, position)
                yield Place(owner, position, functools.partial(_item, holder, position), put)
    elif isinstance(holder, types.CellType):
        put = functools.partial(setattr, holder, "cell_contents")
        yield Place(owner, 0, functools.partial(getattr, holder, "cell_contents"), put)
    elif isinstance(holder, tuple) and not isinstance(holder, torch.Size):
        around = list(places_of({id(holder): holder}, apart_from))
        yield from around or [_no_place(owner)]
    else:
        # What is left has no place to put anything: a set, a generator, an object written in C.
        yield from list(_attributes(holder, wanted)) or [_no_place(owner)]


def _no_place(owner: Any) -> Place:
    return Place(owner, 0, lambda: None, None)


def _attributes(obj: Any, wanted: Mapping[int, Any]) -> Iterator[Place]:
    for key, value in list(getattr(obj, "__dict__", {}).items()):
        if id(value) in wanted:
            put = functools.partial(vars(obj).__setitem__, key)
            yield Place(obj, key, functools.partial(vars(obj).get, key), put)
    for slot in slots_in(type(obj)):
        if id(_slot(slot, obj)) in wanted:
            put = functools.partial(slot.__set__, obj)
            yield Place(obj, slot.__name__, functools.partial(_slot, slot, obj), put)


def _slot(slot: types.MemberDescriptorType, obj: Any) -> Any:
    try:
        return slot.__get__(obj)
    except AttributeError:  # it is empty
        return None


def _item(items: Sequence[Any], position: int) -> Any:
    return items[position] if position < len(items) else None


def _owner(holder: Any) -> Any:
    """Returns the object or class whose attributes a dict holds, else the holder."""
    if isinstance(holder, dict):
        for each in gc.get_referrers(holder):
            attributes = getattr(each, "__dict__", None)
            if attributes is holder:
                return each
            # That of a class is shown through a proxy.
            if isinstance(each, type) and any(
                one is holder for one in gc.get_referents(attributes)
            ):
                return each
    return holder
