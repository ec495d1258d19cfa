"""Modules that read in the next microbatch what they have kept of this one: memories, averages.

Such a module runs on one partition, where the next call finds it. Cut over several, its code would
run before anything is computed, and find a stand-in. Before the partition is decided, a module that
has kept an activation in an attribute of its own is called once more on fakes: it reads it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from smdistributed.modelparallel.torch.record.leaves.attributes import Deed
from smdistributed.modelparallel.torch.record.leaves.spans import Span
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.stored import fakes_in
from smdistributed.modelparallel.torch.record.trace.tree import Entry


def keep_remembering_whole(
    context: Context, now: Microbatch, deed_of: Callable[[Entry], Deed | None]
) -> None:
    """Has modules kept whole that would read in the next microbatch what they keep of this one.

    Args:
        context: of the recorder.
        now: a microbatch that has run, before the partition is decided.
        deed_of: calls a module again, in what it has left.
    """
    last = {span.module: span for span in now.spans if not span.failed}
    for module, span in last.items():
        is_cut = any(True for _ in module.children())
        kept = list(_kept(span)) if is_cut else []
        if not kept or context.scene.is_most_of_a_model(module):
            continue
        deed = deed_of(span.entry)
        if deed is not None and any(each is fake for each in deed.read for fake in kept):
            reason = "it reads in a microbatch what it has kept of the one before"
            context.calls.keep_whole(module, reason)


def _kept(span: Span) -> Iterator[torch.Tensor]:
    """Yields the fakes that a call has put into attributes of the module."""
    for change in span.entry.changes:
        if change.owner is not None and change.owner.module is span.module:
            yield from fakes_in(change.now)
