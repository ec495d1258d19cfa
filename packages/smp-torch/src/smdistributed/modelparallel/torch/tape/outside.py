"""Tensors from outside of a pass: where they are, and what becomes of their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.backward import (
    hooks_after_accumulation,
    hooks_on_gradient,
)
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.sharding.parameter import held


class Outside:
    """Parameters, buffers and other tensors, as kernels that were captured have them.

    Args:
        tensors: all that passes use and neither got nor made.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list({id(each): each for each in tensors}.values())
        self._places = list(map(place_of, self._tensors))

    def has_changed(self) -> bool:
        """Whether one is elsewhere, has other looks, or hooks; its numbers do not count."""
        return self._places != list(map(place_of, self._tensors))


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor is, how it looks, and what becomes of its gradient."""
    with past_subclass_functions():  # nothing is gathered for it
        here = held(tensor)
        is_strided = here.layout is torch.strided
        return (
            (here.data_ptr(), here.stride()) if is_strided else (),
            (here.shape, here.dtype, here.is_conj(), here.is_neg()),
            tensor.requires_grad,
            hooks_on_gradient(tensor),
            hooks_after_accumulation(tensor),
        )
