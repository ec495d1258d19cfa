"""Collectives of a run on fake tensors: what a step is recorded from makes shapes only.

On a host they take as much memory meanwhile as those that move numbers, so that the memory of a
step is known from its recording. GPUs exchange through windows, which are there all the time.
Partitions are to be the same on both: what modules make is counted without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from smdistributed.modelparallel.torch.collectives.delegating import DelegatingCollectives
from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor


class ShapesOfFakes(DelegatingCollectives):
    """Hands real tensors on to a backend, and answers for fake ones without it.

    Args:
        backend: moves real tensors.
    """

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        if is_fake(tensor):
            return tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        return super().gather(tensor, sizes)

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        if is_fake(tensor):
            if tensor.is_cuda:
                return tensor.new_empty((sizes[self.rank], *tensor.shape[1:]))
            with _exchanging():
                parts = torch.split(tensor, list(sizes))
                given = self.swap(parts, [parts[self.rank].shape] * self.size)
            return torch.empty_like(given[0])
        return super().scatter_sum(tensor, sizes)

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """See ``Collectives.sum_parts``."""
        own = parts[self.rank]
        if is_fake(own):
            return torch.empty_like(own)
        return super().sum_parts(parts, with_own=with_own)

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """See ``Collectives.swap``."""
        if is_fake(parts[0]):
            return _taken(parts, shapes)
        return super().swap(parts, shapes)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.sum``."""
        return torch.empty_like(tensor) if is_fake(tensor) else super().sum(tensor)


def _taken(parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Returns fakes of what other ranks give, and on a host has what goes laid side by side."""
    side_by_side = None
    if not parts[0].is_cuda:
        with _exchanging():
            side_by_side = parts[0].new_empty(sum(part.numel() for part in parts))
    taken = [parts[0].new_empty(shape) for shape in shapes]
    if side_by_side is not None:
        with _exchanging():
            side_by_side.view(-1)  # it is there until all has come
    return taken


#: How many exchanges are in progress that make memory of their own.
_num_exchanging = 0


@contextlib.contextmanager
def _exchanging() -> Iterator[None]:
    global _num_exchanging
    _num_exchanging += 1
    try:
        yield
    finally:
        _num_exchanging -= 1


def is_exchanging() -> bool:
    """Whether what is made now is memory of an exchange, and no result."""
    return _num_exchanging > 0


def is_fake(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)
