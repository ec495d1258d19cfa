"""Calls that give few numbers of a whole sequence: its first token, a maximum, a norm along it.

Or of a narrow one, of which all is no more than the tokens and labels that every rank has anyway:
scores, losses or values of tokens. Such a call is made for the whole on every rank, which pieces
are gathered to, as keys are for attention. What gives more would leave every rank with as much as
one process has, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes
from smdistributed.modelparallel.torch.compat.private.tensors import (
    has_memory,
    storage_of,
    version_of,
)
from smdistributed.modelparallel.torch.context_parallel.actions import OfGathered
from smdistributed.modelparallel.torch.context_parallel.calls import (
    Call,
    put_together,
    results_of,
)
from smdistributed.modelparallel.torch.context_parallel.layout import BLOCKS, Layout
from smdistributed.modelparallel.torch.tensors.memory import MemoryNotes


class Copies:
    """Copies of tokens of pieces, which code takes for views."""

    def __init__(self) -> None:
        self._notes: MemoryNotes[None] = MemoryNotes()
        self._has_any = False

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes note of copies."""
        self._has_any = True
        for each in tensors:
            self._notes[each] = None

    def among(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Returns those of some tensors that see a copy, and how often each was changed."""
        if not self._has_any:
            return []
        return [
            (each, version_of(each)) for each in tensors if has_memory(each) and each in self._notes
        ]


def of_few(
    call: Call,
    results: Sequence[torch.Size],
    layouts: Sequence[Layout | None],
    num_ranks: int,
    most: int,
) -> OfGathered | None:
    """Returns how a call is made for wholes that pieces are gathered to; None if not at all.

    Args:
        call: as it was made for the whole.
        results: shapes of what it gave.
        layouts: how each tensor is cut of which a rank has a piece.
        num_ranks: that share a sequence.
        most: as many numbers of the whole as every rank has anyway.
    """
    pairs = zip(call.shapes, layouts, strict=True)
    pieces = [_in_frame(shape, layout) for (shape, _), layout in pairs if layout is not None]
    pairs = zip(call.shapes, layouts, strict=True)
    gathered = sum(shape.numel() for (shape, _), layout in pairs if layout is not None)
    is_narrow = max(gathered, sum(each.numel() for each in results)) <= most
    if not results or not (is_narrow or is_few(results, pieces, num_ranks)):
        return None
    views = gives_views(call.function, call.spec, call.leaves, call.shapes, results)
    if views is None and not is_narrow:
        return None
    pairs = zip(call.shapes, layouts, strict=True)
    sizes = tuple(0 if layout is None else shape[layout.dim] for (shape, _), layout in pairs)
    return OfGathered(call.leaves, tuple(layouts), sizes, views is not False)


def is_few(results: Sequence[torch.Size], pieces: Sequence[int], num_ranks: int) -> bool:
    """Whether results have no more numbers than one block of what is cut.

    Args:
        results: shapes of the results.
        pieces: how many numbers the wholes have that are cut.
        num_ranks: that share a sequence.
    """
    most = max(pieces) // (BLOCKS * num_ranks)
    return bool(results) and sum(each.numel() for each in results) <= most


def _in_frame(whole: torch.Size, layout: Layout) -> int:
    """Returns how many numbers a tensor would have of all tokens of its sequence."""
    window = layout.window
    return whole.numel() if window is None else whole.numel() * window.frame // len(window)


def gives_views(
    function: Callable[..., Any],
    spec: Any,
    leaves: Sequence[Any],
    tensors: Sequence[tuple[torch.Size, torch.dtype]],
    results: Sequence[torch.Size],
) -> bool | None:
    """Returns whether results see the memory of what is given.

    Args:
        function: that is called.
        spec: the structure of its arguments.
        leaves: the arguments for the whole, with holes for tensors.
        tensors: shapes of the wholes, with their types.
        results: shapes that the call has given for the whole.

    Returns:
        whether they do; None if shapes alone do not tell those of the results.
    """
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in tensors]
    try:
        with past_all_modes(), torch.no_grad():
            args, kwargs = put_together(spec, leaves, metas)
            found = results_of(function(*args, **kwargs))
    except Exception:  # of a function that needs numbers, or has no form without them
        return None
    if [each.shape for each in found] != list(results):
        return None
    memory = {storage_of(each) for each in metas}
    return any(storage_of(each) in memory for each in found)
