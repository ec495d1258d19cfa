"""Collectives that have another backend do what they do not do themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes


class DelegatingCollectives:
    """Hands every function on; subclasses do some of them otherwise. See ``Collectives``.

    Args:
        backend: does them.
    """

    def __init__(self, backend: Collectives) -> None:
        self._backend = backend
        self.size = backend.size
        self.rank = backend.rank

    def gather(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.gather``."""
        return self._backend.gather(tensor, sizes)

    def scatter_sum(self, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """See ``Collectives.scatter_sum``."""
        return self._backend.scatter_sum(tensor, sizes)

    def sum_parts(self, parts: Sequence[torch.Tensor], *, with_own: bool = True) -> torch.Tensor:
        """See ``Collectives.sum_parts``."""
        return self._backend.sum_parts(parts, with_own=with_own)

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """See ``Collectives.scatter_parts``."""
        return self._backend.scatter_parts(tensor, sizes)

    def swap(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> list[torch.Tensor]:
        """See ``Collectives.swap``."""
        return self._backend.swap(parts, shapes)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.sum``."""
        return self._backend.sum(tensor)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.from_first``."""
        return self._backend.from_first(tensor)

    def meet(self) -> None:
        """See ``Collectives.meet``."""
        self._backend.meet()

    @property
    def memory(self) -> object:
        """See ``Collectives.memory``."""
        return self._backend.memory

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """See ``Collectives.compare``."""
        return self._backend.compare(numbers)

    def compare_texts(self, text: str) -> list[str]:
        """See ``Collectives.compare_texts``."""
        return self._backend.compare_texts(text)
