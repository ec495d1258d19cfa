"""The gradients that backward passes start with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: What a loss counts by: a number of the host, or one of the device that nobody waits for.
Scale = float | torch.Tensor


def start_of(tensor: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Returns the gradient of a loss that counts by ``scale``. Shape: that of ``tensor``."""
    if isinstance(scale, torch.Tensor):
        return scale.to(tensor.dtype).expand_as(tensor)
    return torch.full_like(tensor, scale)


def scaled(start: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Returns what a loss that counts by ``scale`` starts with. Shape: that of ``start``."""
    return (start * scale).to(start.dtype)


def differentiate(
    tensors: Any,
    grad_tensors: Any,
    scale: Scale,
    backward: Callable[..., None] = torch.autograd.backward,
) -> None:
    """Does what ``torch.autograd.backward`` does, of losses that count by ``scale``.

    Args:
        tensors: a tensor or a list of some.
        grad_tensors: the gradients that they start with, likewise; None for scalars.
        scale: by what they count.
        backward: makes the pass, as torch's does.
    """
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
        grad_tensors = None if grad_tensors is None else [grad_tensors]
    starts = [
        None
        if tensor.numel() != 1 and start is None
        else start_of(tensor, scale)
        if start is None
        else scaled(start, scale)
        for tensor, start in zip(tensors, grad_tensors or [None] * len(tensors), strict=True)
    ]
    backward(tensors, starts)
