"""Nested tensors whose rows lie one behind the other, beyond PyTorch's public API."""

from __future__ import annotations

from typing import Any

import torch


def is_jagged(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nested, and rows of dim 1 lie one behind the other, without gaps."""
    if not tensor.is_nested or tensor.layout is not torch.jagged:
        return False
    nested: Any = tensor
    return nested.lengths() is None and nested._ragged_idx == 1


def with_values(like: Any, values: torch.Tensor) -> torch.Tensor:
    """Returns a nested tensor of the lengths of another one.

    Args:
        like: the other one; see ``is_jagged``.
        values: the rows of all examples, ``(sum of lengths, ...)``.
    """
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values,
        like.offsets(),
        # Else padding goes to an upper bound of the longest one.
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )
    return made
