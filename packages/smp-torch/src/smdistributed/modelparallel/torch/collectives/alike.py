"""Collectives of a run that one rank makes by itself, as if every rank brought what it brings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smdistributed.modelparallel.torch.collectives.interface import Sizes


class AsIfAlike:
    """Answers for all ranks, none of which is asked. See ``Collectives``.

    A rank that tries a module out needs results of the right shape, with numbers that a module can
    go on with, and no others: its peers may be doing something else.

    Args:
        size: how many ranks there are.
        rank: which of them this is.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        return torch.cat([tensor] * self.size)

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        return self.sum(torch.split(tensor, list(sizes))[self.rank])

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """See ``Collectives.sum_parts``."""
        own = parts[self.rank]
        return self.sum(own if with_own else torch.zeros_like(own))

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """See ``Collectives.scatter_parts``."""
        return [self.scatter_sum(tensor, sizes)]

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """See ``Collectives.swap``."""
        return [parts[self.rank].clone() for _ in shapes]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.sum``."""
        return self.size * tensor

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.from_first``."""
        return tensor.clone()

    def meet(self) -> None:
        """See ``Collectives.meet``."""

    @property
    def memory(self) -> object:
        """See ``Collectives.memory``."""
        return None

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """See ``Collectives.compare``."""
        return [list(numbers) for _ in range(self.size)]

    def compare_texts(self, text: str) -> list[str]:
        """See ``Collectives.compare_texts``."""
        return [text] * self.size
