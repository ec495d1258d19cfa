"""The calls of modules in a run that was made before anyone knew which modules stay whole.

Such a run records every call of a torch function. When the partition is known, the entries between
the start and the end of a leaf's call become one entry.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import past_recording
from smdistributed.modelparallel.torch.record.calls.regions import Region
from smdistributed.modelparallel.torch.record.ir import Leaf
from smdistributed.modelparallel.torch.record.trace.taps import (
    Tap,
    attribute_taps,
    container_taps,
    function_taps,
    has_hooks_of_others,
)
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind, HookedCall
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.tensors.nested import Path


@dataclass(eq=False)
class Span:
    """One call of a module.

    Attributes:
        module: that was called.
        parent: the call that it was made from.
        start, end: position of its first entry, and of the first one after it.
        entry: the call as a whole, as if the module were a leaf.
        snapshot: the Python state before it.
        call: calls modules.
        before: copies of the objects with state that it is given, as they were.
        returned: the tensors that it returns.
        outputs: what stands for those that it returns, and where.
        failed: it raised, and code around it went on.
        written: tensors that belong to no model and that it changes, with copies from before.
        left_behind: why it cannot be a leaf, for what it leaves outside of its result.
        set_outside: attributes that hooks which are lifted out have set, with what was there.
        refused: makes the error, given its name, if its own code did what only a module that stays
            whole can do.
    """

    module: nn.Module
    parent: Span | None
    start: int
    entry: Entry
    snapshot: Snapshot
    call: Callable[..., Any]
    before: list[tuple[Carried, Any]]
    end: int = -1
    failed: bool = False
    returned: list[torch.Tensor] = field(default_factory=list)
    outputs: list[tuple[Path, torch.Tensor]] = field(default_factory=list)
    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    left_behind: Exception | None = None
    set_outside: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)
    refused: Callable[[str], UnsupportedError] | None = None

    def is_inside(self, spans: set[Span]) -> bool:
        """Whether it was made from one of some calls."""
        span = self.parent
        while span is not None:
            if span in spans:
                return True
            span = span.parent
        return False

    def undo(self) -> None:
        """Puts back what the call changed."""
        set_outside = {place: vars(place[0])[place[1]] for place in self.set_outside}
        grown = self.snapshot.put_back()
        for (module, name), content in set_outside.items():
            vars(module)[name] = content
        self.entry.left = [each for each in grown if each.is_own]
        for tap, tensor in container_taps(grown):
            self.entry.inner.setdefault(id(tensor), (tap, tensor))
        self.entry.grown = grown
        self.entry.note_taken()
        for growth in grown:
            growth.remove()
        with past_recording(), torch.no_grad():
            for tensor, before in reversed(self.written):
                tensor.copy_(before)


def leaf_spans(spans: Sequence[Span], leaves: Mapping[nn.Module, Leaf]) -> list[Span]:
    """Returns the calls of leaves, those made from other leaves left out."""
    chosen: dict[Span, None] = {}
    for span in spans:  # outer calls come first
        if span.module in leaves and not span.is_inside(set(chosen)):
            chosen[span] = None
    return list(chosen)


def collapsed(log: Sequence[Entry], chosen: Sequence[Span]) -> list[Entry]:
    """Returns a log with each of some spans as one entry."""
    found: list[Entry] = []
    position = 0
    for span in chosen:
        found += log[position : span.start]
        if not span.failed:
            found.append(span.entry)
            inside = log[span.start : span.end]
            known = {*span.entry.inner, *(id(tensor) for _, tensor in span.entry.outputs)}
            # Hooks that code outside has put on what it made, and calls of code outside.
            found += [
                each
                for each in inside
                if each.is_of_hook or (each.kind is EntryKind.WATCHED and id(each.args[0]) in known)
            ]
        position = span.end
    return [*found, *log[position:]]


def hooked_calls(spans: Sequence[Span]) -> list[HookedCall]:
    """Returns the calls among some that have hooks of others, in the order of their ends.

    Args:
        spans: in the order of their starts.
    """
    hooked = [
        (span.end, -place, span)
        for place, span in enumerate(spans)
        if not span.failed and has_hooks_of_others(span.module)
    ]
    return [
        HookedCall(span.module, span.entry.args, span.entry.kwargs, span.entry.result)
        for _, _, span in sorted(hooked, key=lambda item: item[:2])
    ]


def inner_tensors(
    span: Span, inner: Sequence[Span], names: dict[nn.Module, str]
) -> dict[int, tuple[Tap, torch.Tensor]]:
    """Returns the tensors that a call made besides its result, and where a replay finds them.

    Args:
        span: the call.
        inner: the calls that were made from it.
        names: of modules.
    """
    found: dict[int, tuple[Tap, torch.Tensor]] = {}
    calls: collections.Counter[nn.Module] = collections.Counter()
    for each in inner:
        for path, tensor in each.outputs:
            tap = Tap(each.module, calls[each.module], path, names[each.module])
            found.setdefault(id(tensor), (tap, tensor))
        calls[each.module] += 1
    for tap, tensor in attribute_taps(span.module, names):
        found.setdefault(id(tensor), (tap, tensor))
    return found


def made_by_calls(
    entries: Iterable[Entry], region: Region | None
) -> Iterator[tuple[Tap, torch.Tensor]]:
    """Yields the tensors that calls within a leaf made, and where a replay finds them.

    Args:
        entries: the calls.
        region: that the leaf is called in; what is checkpointed within it is made twice.
    """
    calls = [
        each
        for each in entries
        if each.kind in (EntryKind.CALL, EntryKind.QUESTION) and not each.is_of_hook
    ]
    if all(each.region == region for each in calls):
        yield from function_taps((each.target, each.name, each.outputs) for each in calls)
