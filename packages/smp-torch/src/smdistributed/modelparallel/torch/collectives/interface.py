"""What exchanges tensors between the ranks of a tensor-parallel group.

A backend moves data and knows nothing of models; ``tensor_parallel.exchange`` makes its functions
differentiable. There is one for torch's process groups (``process_group``), and one for GPUs of one
host, which read each other's memory (``copy_engine``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Sizes = Sequence[int]


class Collectives(Protocol):
    """Collective functions of a group; every rank of it calls the same ones in the same order.

    Attributes:
        size: how many ranks there are.
        rank: which of them this is.
    """

    size: int
    rank: int

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Returns the tensors of all ranks, one after the other along dim 0.

        Shape: ``(sizes[rank], ...)``; returns ``(sum(sizes), ...)``.
        """

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Sums over the ranks, and returns the own part along dim 0.

        Shape: ``(sum(sizes), ...)``; returns ``(sizes[rank], ...)``.
        """

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """Sums over the ranks what each gives this one, and returns that.

        Shape: ``(sizes[rank],)``, and so of each part for its rank.

        Args:
            parts: what each rank gets of this one, contiguous.
            with_own: what a rank gives itself counts; else the numbers in that part mean nothing.
        """

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """Returns tensors whose sum is what ``scatter_sum`` returns, for who reads them once.

        They may be overwritten from the exchange after the next on, so what reads them is to be
        started before that.
        """

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """Gives each rank its part, and returns what the ranks gave this one.

        Args:
            parts: what each rank gets.
            shapes: of what each rank gives.
        """

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, the same bits on each."""

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of the first rank; all give one of the same shape and type."""

    def meet(self) -> None:
        """Has the ranks meet: what they have exchanged before may be overwritten afterwards.

        Exchanges that follow each other as they are called see to that themselves; those that were
        captured, and are done again whenever the job pleases, cannot.
        """

    @property
    def memory(self) -> object:
        """What exchanges use at present; captured ones need it as long as they are kept."""

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, as many from each."""

    def compare_texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks."""
