"""Tensors that a leaf reads and is not given: they are lent to it, for the time of its call.

A script keeps a mask, or features, in an attribute, a dict or a global, and a module reads them
there. The rank that runs the module may be another, and there all microbatches have kept theirs by
then. So what a leaf found in such a place is an input of its call, like its arguments: it is put
there for the call, and what was there comes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.trace.tree import Entry
from smdistributed.modelparallel.torch.record.trace.unknown import Unknown
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.holders import MISSING
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot
from smdistributed.modelparallel.torch.state.spots import Found, Spot
from smdistributed.modelparallel.torch.tensors.nested import (
    fill,
    opaque_objects,
    template,
    tensors_in,
)


class Done(NamedTuple):
    """What a leaf did that may tell whether it finds its state as it left it.

    Attributes:
        before: the Python state before its call.
        changes, grown: what it changed of that, and what it put into containers of others.
        written: tensors that it changed in place.
        has_regions: it checkpointed a call in it, whose backward pass reads again.
    """

    before: Snapshot
    changes: Sequence[Change]
    grown: Sequence[Growth]
    written: Sequence[torch.Tensor]
    has_regions: bool


def tensors_left(result: Any, changes: Iterable[Change]) -> Iterator[torch.Tensor]:
    """Yields the tensors of the step that a leaf returned or kept, whoever has made them."""
    # What was in a list before has been left there by others.
    kept = [each.now if each.added is None else [*each.added.values()] for each in changes]
    yield from (each for each in tensors_in([result, kept]) if isinstance(each, FakeTensor))


def lent_to(
    entry: Entry, borrowed: Sequence[torch.Tensor], pinned: Iterable[Spot], done: Done
) -> list[tuple[Spot, Any]]:
    """Returns what is lent to a leaf for a call: each place, and what is in it.

    Args:
        entry: of the call.
        borrowed: what it has read that it is not given.
        pinned: where other calls of the leaf find what is lent to them.
        done: what it did.

    Returns:
        nothing, if what it has read cannot be lent.
    """
    # What it does when its call is over, or twice, would not find it.
    if not borrowed or entry.runs_backward or entry.decides or done.has_regions:
        found = []
    else:
        found = done.before.spots_of({id(tensor) for tensor in borrowed}) or []
    if not all(_is_kept(each, done) for each in found):
        found = []
    memory = set(map(storage_of, borrowed))
    if not all(memory.isdisjoint([storage_of(each)]) for each in done.written):
        found = []
    contents = {each.spot: each.content for each in found}
    for spot in pinned:
        content = known_in(done.before.content(spot))
        if content is MISSING or not opaque_objects(content):
            contents.setdefault(spot, content)
    return [(spot, _template(content)) for spot, content in contents.items()]


def known_in(content: Any) -> Any:
    """Returns what is in a place; ``MISSING`` also for what is not computed yet."""
    return MISSING if isinstance(content, Unknown) else content


def _template(content: Any) -> Any:
    return template(content, lambda tensor: tensor, lambda obj: obj)


def _is_kept(found: Found, done: Done) -> bool:
    """Whether a place has something to put there anew, and a leaf leaves that as it is."""
    return (
        not opaque_objects(found.content)
        and not any(id(growth.obj) in found.lists for growth in done.grown)
        and not any(
            change.owner is not None
            and found.spot.starts_at(vars(change.owner.module), change.owner.attribute)
            and change.added is None
            for change in done.changes
        )
    )


@contextlib.contextmanager
def in_place(entry: Entry) -> Iterator[None]:
    """Lends a leaf what it found when it was recorded.

    Raises:
        LookupError: nothing leads to such a place any more.
    """
    with contextlib.ExitStack() as stack:
        for spot, content in entry.lent:
            stack.enter_context(spot.showing(fill(content, (), lambda each: each)))
        yield
