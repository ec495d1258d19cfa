"""Notes on the memory of tensors are about that memory, and no other."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.tensors.memory import MemoryNotes

MANY = 300


def test_views_share_a_note() -> None:
    notes = MemoryNotes[str]()
    tensor = torch.zeros(4)
    notes[tensor[1:]] = "first"
    assert tensor in notes
    notes[tensor] = "second"
    assert notes.get(storage_of(tensor[2:])) == "second"
    assert torch.zeros(4) not in notes


def test_memory_that_comes_later_has_no_note() -> None:
    """Without a weak reference, the next tensor gets the number of the one that has gone."""
    notes = MemoryNotes[None]()
    for _ in range(MANY):
        tensor = torch.zeros(4)
        assert tensor not in notes
        notes[tensor] = None


def test_notes_go_with_their_memory() -> None:
    notes = MemoryNotes[None]()
    for _ in range(MANY):
        notes[torch.zeros(4)] = None
    assert len(notes._notes) < MANY / 2
