"""What functions of torch are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def leaves_of(structure: Any) -> Iterator[Any]:
    """Yields what is in arguments of a function, however deep."""
    if isinstance(structure, dict):
        structure = structure.values()
    elif isinstance(structure, torch.Tensor) or not hasattr(structure, "__iter__"):
        yield structure
        return
    elif isinstance(structure, str):
        return
    for each in structure:
        yield from leaves_of(each)


def name_of(func: Any) -> str:
    """Returns the name of a function of torch, for messages."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))


def is_identity(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a conversion of a tensor gives the tensor itself."""
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs) is like
