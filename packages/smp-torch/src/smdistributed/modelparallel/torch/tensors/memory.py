"""Notes on the memory of tensors: views have that of their base, and a note keeps none of it."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from smdistributed.modelparallel.torch.compat.private.tensors import storage_of

T = TypeVar("T")

#: Notes that are there before those of memory that is gone are looked for.
_FEW = 64


class MemoryNotes(Generic[T]):
    """A mapping from the memory of strided tensors, which goes with its last tensor.

    The number of memory that is gone is soon given to other memory. Each note therefore has a weak
    reference, which keeps the number, not the memory: a pass in which a thousand tensors came and
    went, and then a weight is gathered, does not take the weight for one of them.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, T]] = {}
        self._num_looked_at = _FEW

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._notes

    def __setitem__(self, tensor: torch.Tensor, note: T) -> None:
        number = storage_of(tensor)
        if (found := self._notes.get(number)) is not None:
            self._notes[number] = found[0], note
            return
        if len(self._notes) >= self._num_looked_at:
            self._let_go()
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._notes[number] = reference, note

    def get(self, number: int) -> T | None:
        """Returns the note on memory of a number; None if there is none."""
        found = self._notes.get(number)
        return None if found is None else found[1]

    def _let_go(self) -> None:
        """Drops notes on memory that is gone; so rarely that each note pays for one look."""
        for number, (reference, _) in list(self._notes.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                del self._notes[number]
        self._num_looked_at = max(_FEW, 2 * len(self._notes))
