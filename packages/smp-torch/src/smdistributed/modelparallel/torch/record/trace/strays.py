"""Fakes that code has stored somewhere.

The fakes of a trace stand for other tensors in each microbatch. One that outlives its microbatch,
in an attribute, a list, a closure, would be taken for the tensor of the next one. A fake that does
is held by more than the trace: its reference count tells, and then the garbage collector tells
where. What is the same in every microbatch is replaced by the real tensor; all else is refused.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.stored import Stored
from smdistributed.modelparallel.torch.record.trace.tree import Constant, Entry, Trace, Way
from smdistributed.modelparallel.torch.state.holders import Holder


def watch(way: Way, trace: Trace, scene: Scene) -> None:
    """Takes note of the fakes of a new way; those of the models are where they belong."""
    found = {id(fake): fake for fake in trace.inputs}
    for entry in way.entries:
        found.update((id(fake), fake) for _, fake in entry.outputs if isinstance(fake, FakeTensor))
    way.fakes = [fake for key, fake in found.items() if key not in scene.slots]


def count(trace: Trace) -> None:
    """Takes the present counts of all ways for those without strays."""
    for entry in _entries(trace):
        if entry.way is not None:
            entry.way.counts = list(map(sys.getrefcount, entry.way.fakes))


def suspects(way: Way) -> list[torch.Tensor]:
    """Returns fakes that are held more often than they were."""
    if way.counts == (now := list(map(sys.getrefcount, way.fakes))):
        return []
    return [
        fake
        for fake, former, found in zip(way.fakes, way.counts, now, strict=True)
        if found > former
    ]


def settle(
    fakes: Sequence[torch.Tensor],
    trace: Trace,
    scene: Scene,
    constant: Callable[[torch.Tensor], torch.Tensor | None],
    values: Mapping[int, Value],
) -> list[Stored]:
    """Replaces strays that are the same in every microbatch by real tensors; returns the others.

    Args:
        fakes: that may be held by others than the trace.
        trace: that they belong to.
        scene: the models.
        constant: gives the real tensor for one that is the same in every microbatch, else None.
        values: by the identity of a fake, what it stands for, if the step can return that.

    Raises:
        UnsupportedError: a tensor of this microbatch is stored where nothing can be put.
    """
    problem, stored = _settle(fakes, trace, scene, constant, values)
    if problem is not None or stored:
        del problem, stored  # which keep the places
        gc.collect()  # whatever refers to itself
        problem, stored = _settle(fakes, trace, scene, constant, values)
    if problem is not None:
        raise problem
    return stored


def _settle(
    fakes: Sequence[torch.Tensor],
    trace: Trace,
    scene: Scene,
    constant: Callable[[torch.Tensor], torch.Tensor | None],
    values: Mapping[int, Value],
) -> tuple[UnsupportedError | None, list[Stored]]:
    """Replaces what can be replaced; returns what is wrong with the rest, and what is stored."""
    own = {id(fakes), *_containers(trace)}
    wanted = {id(fake): fake for fake in fakes}
    problem = None
    stored: list[Stored] = []
    for holder in gc.get_referrers(*fakes):
        if id(holder) in own or holder is wanted or isinstance(holder, types.FrameType | Entry):
            continue
        if (
            isinstance(holder, tuple)
            and len(holder) == len(fakes)
            and all(map(operator.is_, holder, fakes))
        ):
            continue  # the arguments of the call above
        owner = _owner(holder)
        for key, fake, get, put in _places(holder, owner, wanted):
            if isinstance(owner, FakeTensor | torch.autograd.function.FunctionCtx | Constant):
                continue
            if isinstance(owner, nn.Module) and (owner, key) in scene.hidden:
                continue
            real = constant(fake) if put is not None else None
            place = _name(owner, key)
            if put is not None and real is not None:
                put(real)
            elif put is not None and get is not None and id(fake) in values:
                stored.append(Stored(place, id(fake), values[id(fake)], get, put))
            else:
                problem = UnsupportedError(
                    f"the step function, or the forward of a module that is split over partitions, "
                    f"stored a tensor in {place}. A pipelined step computes it elsewhere, so only "
                    "a stand-in is here: return the tensor instead, or put the module on one "
                    "partition."
                )
    return problem, stored


#: Returns what is in a place, and puts something there.
_Get = Callable[[], Any]
_Put = Callable[[Any], None]


def _places(
    holder: Any, owner: Any, wanted: dict[int, torch.Tensor]
) -> Iterator[tuple[Any, torch.Tensor, _Get | None, _Put | None]]:
    """Yields key, fake, and what reads and fills the place, for each place in a holder."""
    if isinstance(owner, type):
        # Not into the dict: Python remembers what it has found in a class until that is told.
        for key, value in list(vars(owner).items()):
            if id(value) in wanted:
                put = functools.partial(type.__setattr__, owner, key)
                yield key, value, functools.partial(vars(owner).get, key), put
    elif isinstance(holder, dict):
        for key, value in list(dict.items(holder)):
            if id(value) in wanted:
                put = functools.partial(dict.__setitem__, holder, key)
                yield key, value, functools.partial(dict.get, holder, key), put
    elif isinstance(holder, list):
        for position, value in enumerate(list(holder)):
            if id(value) in wanted:
                put = functools.partial(holder.__setitem__, position)
                yield position, value, functools.partial(_item, holder, position), put
    elif isinstance(holder, types.CellType):
        put = functools.partial(setattr, holder, "cell_contents")
        yield 0, holder.cell_contents, functools.partial(getattr, holder, "cell_contents"), put
    elif isinstance(holder, tuple | set | frozenset | types.GeneratorType):
        yield 0, next(iter(wanted.values())), None, None
    else:
        for key, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) in wanted:
                put = functools.partial(vars(holder).__setitem__, key)
                yield key, value, functools.partial(vars(holder).get, key), put
        for base in type(holder).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if id(getattr(holder, key, None)) in wanted:
                    put = functools.partial(object.__setattr__, holder, key)
                    get = functools.partial(getattr, holder, key, None)
                    yield key, getattr(holder, key), get, put


def _item(items: list[Any], position: int) -> Any:
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


def _name(owner: Any, key: Any) -> str:
    if isinstance(owner, Holder):
        return owner.path  # what holds it shows itself to our snapshot alone
    kind = type(owner).__name__
    return f"{kind}.{key}" if isinstance(key, str) else f"a {kind}"


def _containers(trace: Trace) -> Iterator[int]:
    """Yields the identities of all containers in which a trace holds fakes."""
    seen: set[int] = set()
    pending: list[Any] = [trace.inputs, trace.metadata]
    for entry in _entries(trace):
        pending += (entry.args, entry.kwargs, entry.result, entry.outputs, entry.changed)
        pending += (entry.inner, entry.hooked, entry.hidden, entry.held, entry.effects)
        # Not the containers themselves, which are the user's.
        pending += (entry.borrowed, *(each.added for each in entry.left))
        if entry.way is not None:
            yield id(entry.way.fakes)
    while pending:
        obj = pending.pop()
        if isinstance(obj, Container):
            obj = obj.items
        if isinstance(obj, dict):
            yield id(obj)
            pending += obj.values()
        elif isinstance(obj, tuple | list):
            yield id(obj)
            pending += obj
        elif isinstance(obj, slice):
            yield id(obj)
        elif id(obj) not in seen and _is_object(obj):
            # What leaves do to objects that they are given is kept as copies of these.
            seen.add(id(obj))
            yield id(obj)
            pending.append(vars(obj))


def _is_object(obj: Any) -> bool:
    return hasattr(obj, "__dict__") and not isinstance(obj, torch.Tensor | type | nn.Module)


def _entries(trace: Trace) -> Iterator[Entry]:
    pending = [trace.start]
    while pending:
        entry = pending.pop()
        pending += entry.following
        yield entry
