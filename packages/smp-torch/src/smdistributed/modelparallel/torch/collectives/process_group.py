"""Collectives by torch's process groups: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.collectives.host_numbers import MOST_NUMBERS, HostNumbers
from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.compat.private.distributed import (
    all_gather_into,
    real,
    reduce_scatter_into,
)


class ProcessGroupCollectives:
    """Exchanges by a process group of torch that nothing else uses.

    That nothing else does matters: ranks need not agree on the order of these exchanges and of
    reductions of gradients, which start when autograd has them.

    Args:
        group: torch's.
        blaming: a context in which errors of torch become errors that name who is missing.

    Attributes:
        numbers: compares numbers, if the ranks share memory of their host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        blaming: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._group = group
        self._blaming = blaming
        self.numbers: HostNumbers | None = None
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        largest, rest = max(sizes), tensor.shape[1:]
        out = tensor.new_empty((self.size * largest, *rest))
        own = _padded(tensor.contiguous(), largest)
        with self._blaming():
            all_gather_into(out, own, self._group)
        if min(sizes) == largest:
            return out
        parts = zip(torch.split(out, largest), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        parts = torch.split(tensor, list(sizes))
        if not tensor.is_cuda:
            # In the order of the ranks, and in single precision at least.
            shape = parts[self.rank].shape
            given = self.swap(parts, [shape] * self.size)
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = given[0].to(wide, copy=True)
            for part in given[1:]:
                total += part
            return total.to(tensor.dtype)
        largest = max(sizes)
        if min(sizes) != largest:
            tensor = torch.cat([_padded(part, largest) for part in parts])
        out = tensor.new_empty((largest, *tensor.shape[1:]))
        with self._blaming():
            reduce_scatter_into(out, tensor.contiguous(), self._group)
        return out[: sizes[self.rank]]

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """See ``Collectives.sum_parts``."""
        every = list(parts)
        if not with_own:
            every[self.rank] = torch.zeros_like(every[self.rank])
        return self.scatter_sum(torch.cat(every), [part.numel() for part in every])

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """See ``Collectives.scatter_parts``; there is one."""
        return [self.scatter_sum(tensor, sizes)]

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """See ``Collectives.swap``."""
        sent = [part.numel() for part in parts]
        counts = [shape.numel() for shape in shapes]
        flat = torch.cat([part.reshape(-1) for part in parts])
        out = flat.new_empty(sum(counts))
        with self._blaming():
            dist.all_to_all_single(out, flat, counts, sent, group=self._group)
        received = torch.split(out, counts)
        return [part.view(shape) for part, shape in zip(received, shapes, strict=True)]

    def exchange(
        self,
        given: Mapping[int, Sequence[torch.Tensor]],
        taken: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Sends other ranks tensors, and receives as many as each of them sends, in one exchange.

        Args:
            given: contiguous tensors for each rank.
            taken: take those of each rank, which have their shapes and types.
        """
        operations = [
            dist.P2POp(function, real(each), group=self._group, group_peer=rank)
            for function, tensors in ((dist.isend, given), (dist.irecv, taken))
            for rank, all_of_it in tensors.items()
            for each in all_of_it
        ]
        with self._blaming():  # all ranks enter it, also those that have nothing to say
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.sum``."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        with self._blaming():
            dist.all_reduce(total, group=self._group)
        return total

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.from_first``."""
        common = tensor.clone(memory_format=torch.contiguous_format)
        with self._blaming():
            dist.broadcast(common, group=self._group, group_src=0)
        return common

    def meet(self) -> None:
        """See ``Collectives.meet``; nobody reads the memory of another one."""

    @property
    def memory(self) -> object:
        """See ``Collectives.memory``; the group, which lives longer."""
        return None

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """See ``Collectives.compare``; on the host, so that no GPU is waited for."""
        if self.numbers is not None and len(numbers) <= MOST_NUMBERS:
            with self._blaming():
                return self.numbers.compare(numbers)
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        out = own.new_empty(self.size * len(numbers))
        with self._blaming():
            all_gather_into(out, own, self._group)
        found: list[list[int]] = out.view(self.size, -1).tolist()
        return found

    def compare_texts(self, text: str) -> list[str]:
        """See ``Collectives.compare_texts``."""
        found: list[Any] = [None] * self.size
        with self._blaming():
            dist.all_gather_object(found, text, group=self._group)
        return found


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - tensor.shape[0]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
