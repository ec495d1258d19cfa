"""Fakes that code has stored somewhere.

The fakes of a trace stand for other tensors in each microbatch. One that outlives its microbatch,
in an attribute, a list, a closure, would be taken for the tensor of the next one. A fake that does
is held by more than the trace: its reference count tells, and then the garbage collector tells
where. What is the same in every microbatch is replaced by the real tensor; all else is refused.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.places import Place, places_in, places_of
from smdistributed.modelparallel.torch.record.trace.stored import Stored, fakes_in
from smdistributed.modelparallel.torch.record.trace.tree import Entry, Trace, Way


def watch(way: Way, trace: Trace, scene: Scene) -> None:
    """Takes note of the fakes of a new way; those of the models are where they belong."""
    found: dict[int, Any] = {id(fake): fake for fake in trace.inputs}
    for entry in way.entries:
        found.update((id(fake), fake) for _, fake in entry.outputs if isinstance(fake, FakeTensor))
        found.update((id(fake), fake) for fake in entry.given_to_hooks)
        if entry.is_fixed:  # the script gets the very tuple
            found.update((id(each), each) for each in _tuples(entry.result))
    way.fakes = [fake for key, fake in found.items() if key not in scene.slots]


def _tuples(result: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the tuples with fakes in a result that nobody can change."""
    if isinstance(result, tuple):
        if any(isinstance(each, FakeTensor) for each in result):
            yield result
        for each in result:
            yield from _tuples(each)


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


def returned(way: Way) -> dict[int, Value]:
    """Returns by the identity of a fake what it stands for, of what ranks are given after a way."""
    kept = set(way.graph.kept)
    return {key: value for key, value in way.values.items() if value in kept}


def settle_in(
    way: Way, scene: Scene, constant: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[Stored]:
    """Returns the strays of a way in lists that had some before, each with one more at its end.

    To look for the holders of a tensor takes the garbage collector a while.

    Args:
        way: has been gone before.
        scene, constant: as for ``settle``.
    """
    rows = {id(row): row for each in way.stored if (row := each.row) is not None}
    if not rows:
        return []
    wanted, values = {id(fake): fake for fake in suspects(way)}, returned(way)
    found = []
    for place in places_in(list(rows.values()), wanted):
        tensors = _stand_for(place, scene, constant, values)
        if tensors is not None and (each := Stored(place, tensors)).values:
            found.append(each)
    return found


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
    wanted = {id(fake): fake for fake in fakes}
    problem = None
    stored: list[Stored] = []
    for place in places_of(wanted, {id(fakes), *_containers(trace)}):
        if isinstance(place.owner, nn.Module) and (place.owner, place.key) in scene.hidden:
            continue
        tensors = _stand_for(place, scene, constant, values)
        if tensors is None:
            problem = UnsupportedError(
                f"the step function, or the forward of a module that is split over partitions, "
                f"stored a tensor in {place.name}. A pipelined step computes it elsewhere, so only "
                "a stand-in is here: return the tensor instead, or put the module on one "
                "partition."
            )
            continue
        each = Stored(place, tensors)
        if each.values:
            stored.append(each)
        elif each.close():
            each.fill({})
    return problem, stored


def _stand_for(
    place: Place,
    scene: Scene,
    constant: Callable[[torch.Tensor], torch.Tensor | None],
    values: Mapping[int, Value],
) -> Mapping[int, Value | torch.Tensor] | None:
    """Returns what the fakes in a place stand for: tensors, if all are the same everywhere."""
    fakes = list(fakes_in(place.get()))
    if place.put is None or not fakes or any(id(fake) in scene.slots for fake in fakes):
        return None
    real = {id(fake): each for fake in fakes if (each := constant(fake)) is not None}
    if len(real) == len(set(map(id, fakes))):
        return real
    return {id(f): values[id(f)] for f in fakes} if all(id(f) in values for f in fakes) else None


def _containers(trace: Trace) -> Iterator[int]:
    """Yields the identities of all containers in which a trace holds fakes."""
    seen: set[int] = set()
    pending: list[Any] = [trace.inputs, trace.metadata]
    for entry in _entries(trace):
        pending += (entry.args, entry.kwargs, entry.result, entry.outputs, entry.changed)
        pending += (entry.hooked, entry.hidden, entry.held, entry.effects)
        pending += (entry.hook_calls, entry.kept_by_hooks)
        # Not the containers themselves, which are the user's.
        pending += (entry.borrowed, *(each.added for each in entry.left))
        pending += (content for _, content in entry.lent)
        yield from map(id, (entry.inner, *entry.inner.values(), *entry.lent))
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
