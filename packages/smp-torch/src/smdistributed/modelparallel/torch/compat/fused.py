"""Small functions over tensors of a GPU, as kernels that PyTorch's compiler makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smdistributed.modelparallel.torch.compat.between import atomic
from smdistributed.modelparallel.torch.compat.private.fusion import in_kernels

_Result = TypeVar("_Result")


def fused(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function that runs compiled where its first argument is on a GPU.

    It is one call of a pass that is taken down or confirmed: whether it is compiled depends on who
    watches, and what is compiled asks nobody who could answer.

    Args:
        function: pure, of tensors and constants.
    """
    return atomic(in_kernels(function))
