"""Two buffers of memory that ranks share, in turn.

Ranks write, each into its own or into those of others, all meet at a barrier, and each reads what
it needs. One barrier an exchange is enough: who has passed that of the next exchange knows that all
have read what they needed in this one, whose buffer is written again in the one after. So all
exchanges run on one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.symmetric_memory import (
    MakeMemory,
    SymmetricMemory,
)

_SMALLEST_BYTES = 1 << 20
#: Of where a part begins, in bytes.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Parts:
    """A buffer in which each rank has a part from every other one, which that one writes.

    Attributes:
        memory: that it lies in.
        start: its first byte.
        part_bytes: of a part.
        num_ranks: that share the memory.
    """

    memory: SymmetricMemory
    start: int
    part_bytes: int
    num_ranks: int

    def between(self, giver: int, taker: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns some numbers that a rank gives another one, in the memory of that."""
        place = (giver - taker - 1) % self.num_ranks
        return self.memory.piece(taker, self.start + place * self.part_bytes, count, dtype)


class AlternatingBuffers:
    """See the module.

    Args:
        make: makes memory that all ranks share.
        collectives: between the ranks.
        synchronize: waits until the device has done everything.
    """

    def __init__(
        self, make: MakeMemory, collectives: Collectives, synchronize: Callable[[], None]
    ) -> None:
        self._make = make
        self._collectives = collectives
        self._synchronize = synchronize
        #: What the buffers are in; None as long as there are none.
        self.memory: SymmetricMemory | None = None
        self._buffer_bytes = 0
        self._turn = 0

    def next(self, size_bytes: int) -> tuple[SymmetricMemory, int]:
        """Returns memory, and where in it the next buffer begins. Collective, if it has to grow.

        Args:
            size_bytes: that it has at least; the same on all ranks.
        """
        if self.memory is None or size_bytes > self._buffer_bytes:
            self._grow(size_bytes)
        assert self.memory is not None
        self._turn = 1 - self._turn
        return self.memory, self._turn * self._buffer_bytes

    def next_parts(self, size_bytes: int) -> Parts:
        """Returns a buffer of parts, as ``next`` returns one.

        Args:
            size_bytes: that a part has at least; the same on all ranks.
        """
        part_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        num_ranks = self._collectives.size
        memory, start = self.next((num_ranks - 1) * part_bytes)
        return Parts(memory, start, part_bytes, num_ranks)

    def meet(self) -> None:
        """Has all ranks meet: any buffer may be written afterwards."""
        if self.memory is not None:
            self.memory.barrier()

    def _grow(self, size_bytes: int) -> None:
        """Makes larger buffers; all ranks do so in the same exchange.

        Raises:
            UnsupportedError: what is done now is captured, so that nothing may be waited for.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("an exchange is larger than those before")
        if self.memory is not None:
            # Nobody may read or write what is given back.
            self._synchronize()
            self._collectives.compare([size_bytes])
            self.memory = None
        # By half at least: tensors of more and more elements may come.
        wanted = max(size_bytes, self._buffer_bytes * 3 // 2)
        self._buffer_bytes = -(-wanted // _SMALLEST_BYTES) * _SMALLEST_BYTES
        self.memory = self._make(2 * self._buffer_bytes)
