"""Memory that processes read from each other, by files: a stand-in for that of GPUs."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives

_numbers = itertools.count()
_CHANNELS = 64
_SECONDS = 20.0


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
        self.num_channels = _CHANNELS
        number = next(_numbers)
        sizes = {"": size_bytes, "signals": _CHANNELS * collectives.size}
        for kind, size in sizes.items():
            (folder / f"{number}{kind}-{collectives.rank}").write_bytes(bytes(size))
        numbers = collectives.compare([number])
        self._parts, self._signals = (
            [
                torch.from_file(
                    str(folder / f"{theirs}{kind}-{rank}"),
                    shared=True,
                    size=size,
                    dtype=torch.uint8,
                )
                for rank, (theirs,) in enumerate(numbers)
            ]
            for kind, size in sizes.items()
        )

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

    def signal(self, rank: int, channel: int) -> None:
        """See ``SymmetricMemory.signal``."""
        place = channel * self._collectives.size + self._collectives.rank
        assert not self._signals[rank][place], "the signal before this one was not waited for"
        self._signals[rank][place] = 1

    def wait(self, rank: int, channel: int) -> None:
        """See ``SymmetricMemory.wait``."""
        place = channel * self._collectives.size + rank
        own = self._signals[self._collectives.rank]
        deadline = time.monotonic() + _SECONDS
        while not own[place]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} gave no signal on channel {channel}")
            time.sleep(0)
        own[place] = 0
