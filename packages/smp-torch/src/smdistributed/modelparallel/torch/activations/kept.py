"""A tensor that autograd keeps, by way of a hook on what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Kept:
    """A saved tensor, and its version; torch compares versions only where it has no hook."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """Keeps a tensor as it is now."""
        # Detached: a saved result would keep itself alive.
        return cls(tensor.detach(), tensor._version)

    def get(self) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        check_version(self.tensor, self.version)
        return self.tensor


class SavingHooks(NamedTuple):
    """A pair for ``torch.autograd.graph.saved_tensors_hooks``.

    Attributes:
        pack: gets a tensor; what it returns is kept.
        unpack: gets that, and returns the tensor.
    """

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


#: They keep what autograd would keep without them.
KEEPING = SavingHooks(Kept.of, Kept.get)


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Makes sure that a saved tensor is what it was.

    Raises:
        RuntimeError: it was changed in place.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version} instead."
        )
