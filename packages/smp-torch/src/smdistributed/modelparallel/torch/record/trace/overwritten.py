"""Tensors that a module writes to when a hook that is lifted out of it has been called.

One process calls the hook before, and here it runs behind the call of the module.
"""

from __future__ import annotations

from collections.abc import Sequence

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind
from smdistributed.modelparallel.torch.tensors.nested import tensors_in


def overwritten(entries: Sequence[Entry]) -> frozenset[int]:
    """Returns the memory that some calls write to."""
    own = (entry for entry in entries if not entry.is_of_hook)
    return frozenset(storage_of(each) for entry in own for each in entry.changed)


def check_not_overwritten(entry: Entry, memory: frozenset[int]) -> None:
    """Makes sure that a hook computes with nothing that its module has written to since.

    Args:
        entry: a call that it makes.
        memory: that was written to.

    Raises:
        UnsupportedError: it does.
    """
    reads = map(storage_of, tensors_in((entry.args, entry.kwargs)))
    if memory.isdisjoint(reads):
        return
    shows = entry.kind is EntryKind.CALL and not entry.changed
    if shows and memory.issuperset(storage_of(each) for _, each in entry.outputs):
        return
    raise UnsupportedError(
        f"{entry} computes with a tensor that a module around writes to afterwards, in place "
        "(nn.ReLU(inplace=True), say), and runs when that is done. Take the write out of place, or "
        "put the hook on the module that writes."
    )
