"""Collectives of a run on fake tensors: what a step is recorded from makes shapes only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor


class ShapesOfFakes:
    """Hands real tensors on to a backend, and answers for fake ones without it.

    Args:
        backend: moves real tensors.
    """

    def __init__(self, backend: Collectives) -> None:
        self._backend = backend
        self.size = backend.size
        self.rank = backend.rank

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        if is_fake(tensor):
            return tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        return self._backend.gather(tensor, sizes)

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        if is_fake(tensor):
            return tensor.new_empty((sizes[self.rank], *tensor.shape[1:]))
        return self._backend.scatter_sum(tensor, sizes)

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """See ``Collectives.swap``."""
        if is_fake(parts[0]):
            return [parts[0].new_empty(shape) for shape in shapes]
        return self._backend.swap(parts, shapes)

    def exchange_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.exchange_rows``."""
        return torch.empty_like(rows) if is_fake(rows) else self._backend.exchange_rows(rows)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.sum``."""
        return torch.empty_like(tensor) if is_fake(tensor) else self._backend.sum(tensor)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.from_first``."""
        return self._backend.from_first(tensor)

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """See ``Collectives.compare``."""
        return self._backend.compare(numbers)

    def compare_texts(self, text: str) -> list[str]:
        """See ``Collectives.compare_texts``."""
        return self._backend.compare_texts(text)


def is_fake(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)
