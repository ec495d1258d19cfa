"""Collectives between GPUs of one host by plain copies from and into each other's memory.

To gather, a rank writes what all need where they can read it, all meet at a barrier, and each
copies it. What one rank alone needs is written into its memory, and summed there after the barrier.
Copies hold no multiprocessor, so what computes beside them is not slowed down. Sums are made in
single precision, in the order of the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.collectives.alternating_buffers import AlternatingBuffers
from smdistributed.modelparallel.torch.collectives.delegating import DelegatingCollectives
from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes
from smdistributed.modelparallel.torch.collectives.sums import fused_sum
from smdistributed.modelparallel.torch.collectives.symmetric_memory import MakeMemory

#: Of what a rank writes; what is larger goes another way.
LARGEST_BYTES = 256 << 20


class CopyEngineCollectives(DelegatingCollectives):
    """Gathers and sums by copies, and leaves everything else to another backend.

    Args:
        backend: for what is not to be gathered or summed, too large, or not on a device.
        make: makes memory that all ranks read and write.
        device: where the memory is.
        synchronize: waits until the device has done everything.
        blaming: a context in which errors of torch become errors that name who is missing.
        largest_bytes: of what a rank writes in an exchange.
    """

    def __init__(
        self,
        backend: Collectives,
        make: MakeMemory,
        device: torch.device,
        synchronize: Callable[[], None],
        blaming: Callable[[], contextlib.AbstractContextManager[Any]],
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        super().__init__(backend)
        self._device = device
        self._blaming = blaming
        self._largest_bytes = largest_bytes
        self._buffers = AlternatingBuffers(make, backend, synchronize)

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        rest = tensor.shape[1:]
        counts = [size * rest.numel() for size in sizes]
        if not self._takes(tensor, max(counts)):
            return super().gather(tensor, sizes)
        out = tensor.new_empty((sum(sizes), *rest))
        parts = [part.view(-1) for part in torch.split(out, list(sizes))]
        with self._blaming():
            memory, start = self._buffers.next(max(counts) * tensor.dtype.itemsize)
            if counts[self.rank]:
                own = memory.piece(self.rank, start, counts[self.rank], tensor.dtype)
                own.view(tensor.shape).copy_(tensor)
            memory.barrier()
            for rank in filter(counts.__getitem__, self._others()):
                parts[rank].copy_(memory.piece(rank, start, counts[rank], tensor.dtype))
            parts[self.rank].view(tensor.shape).copy_(tensor)
        return out

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        if not self._sums([tensor]):
            return super().scatter_sum(tensor, sizes)
        return _sum_of(self._given(torch.split(tensor, list(sizes))))

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """See ``Collectives.sum_parts``."""
        if not self._sums(parts):
            return super().sum_parts(parts, with_own=with_own)
        given = self._given(parts)
        return _sum_of(given if with_own else [given[rank] for rank in sorted(self._others())])

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """See ``Collectives.scatter_parts``; in the order of the ranks."""
        if not self._sums([tensor]):
            return super().scatter_parts(tensor, sizes)
        return self._given(torch.split(tensor, list(sizes)))

    def _given(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gives each other rank its part; returns what all have given this one, itself included."""
        own = parts[self.rank]
        most = max(part.numel() for part in parts)
        with self._blaming():
            given = self._buffers.next_parts(most * own.dtype.itemsize)
            for taker in self._others():
                part = parts[taker]
                if part.numel():
                    there = given.between(self.rank, taker, part.numel(), part.dtype)
                    there.view(part.shape).copy_(part)
            given.memory.barrier()
            if not own.numel():
                return [own] * self.size
            got = {
                giver: given.between(giver, self.rank, own.numel(), own.dtype).view(own.shape)
                for giver in self._others()
            }
        got[self.rank] = own
        return [got[rank] for rank in range(self.size)]

    def meet(self) -> None:
        """See ``Collectives.meet``."""
        with self._blaming():
            self._buffers.meet()

    @property
    def memory(self) -> object:
        """See ``Collectives.memory``."""
        return self._buffers.memory

    def _sums(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether tensors like these are summed here; the same answer on all ranks."""
        total = sum(part.numel() for part in parts)
        return parts[0].is_floating_point() and self._takes(parts[0], total)

    def _takes(self, tensor: torch.Tensor, most: int) -> bool:
        """Whether buffers are for a tensor; the same answer on all ranks.

        Args:
            tensor: on any device.
            most: how many numbers a rank writes at most.
        """
        is_here = tensor.device == self._device and not tensor.is_complex()
        return is_here and 0 < most * tensor.dtype.itemsize <= self._largest_bytes

    def _others(self) -> list[int]:
        """Returns the other ranks, in an order in which not all turn to one at a time."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]


def _sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a sum, in memory of its own."""
    if len(parts) == 1 or not parts[0].numel():
        return parts[0].clone()
    if len(parts) == 2:  # rounded once, too, without the compiler, whose import takes seconds
        return torch.add(*parts)
    return fused_sum(*parts)
