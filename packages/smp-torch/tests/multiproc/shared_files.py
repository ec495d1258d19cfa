"""Memory that processes read from each other, by files: a stand-in for that of GPUs."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives

_numbers = itertools.count()


class FileMemory:
    """A file for each rank, that all have mapped.

    Args:
        size_bytes: of a rank's piece.
        folder: in memory; the same for all ranks.
        collectives: what the ranks meet by.
    """

    def __init__(self, size_bytes: int, folder: Path, collectives: Collectives) -> None:
        self._collectives = collectives
        self.barriers = 0
        number = next(_numbers)
        own = folder / f"{number}-{collectives.rank}"
        own.write_bytes(bytes(size_bytes))
        numbers = collectives.compare([number])
        self._parts = [
            torch.from_file(
                str(folder / f"{theirs}-{rank}"), shared=True, size=size_bytes, dtype=torch.uint8
            )
            for rank, (theirs,) in enumerate(numbers)
        ]

    def piece(self, rank: int, start_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``SymmetricMemory.piece``."""
        assert count > 0
        end = start_bytes + count * dtype.itemsize
        assert end <= len(self._parts[rank])
        return self._parts[rank][start_bytes:end].view(dtype)

    def barrier(self) -> None:
        """See ``SymmetricMemory.barrier``."""
        self.barriers += 1
        self._collectives.compare([self.barriers])
