"""What a forward pass keeps at its cuts for its backward pass.

At a cut a tensor comes in that another pass made, or goes out to one, and gradients take the way
back. Usually the tensors themselves are kept. Where activations are offloaded their memory must not
be held here either: of what comes in only the place where its gradient arrives is kept, of what
goes out the place where its gradient starts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Entrance:
    """Where the gradient of a tensor arrives that autograd does not hold.

    A leaf would be held, by the node that writes its ``grad``.

    Args:
        tensor: what comes in.

    Attributes:
        gradient: what has arrived; laid out as ``grad`` of a leaf would be.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like = torch.empty_like(tensor, device="meta")
        self._device = tensor.device
        self.gradient: torch.Tensor | None = None

    def arrive(self, gradient: torch.Tensor) -> None:
        """Takes the gradient, which comes once."""
        if gradient.stride() != self._like.stride():
            gradient = self._empty().copy_(gradient)
        self.gradient = gradient

    def zeros(self) -> torch.Tensor:
        """Returns the gradient of what nothing depends on."""
        return self._empty().zero_()

    def _empty(self) -> torch.Tensor:
        return torch.empty_like(self._like, device=self._device)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, tensor: torch.Tensor, entrance: Entrance
    ) -> torch.Tensor:
        ctx.entrance = entrance
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.entrance.arrive(gradient)
        return None, None, None


def enter(tensor: torch.Tensor, *, frees: bool) -> tuple[torch.Tensor, torch.Tensor | Entrance]:
    """Returns what a pass computes with in place of a tensor, and what to ask for its gradient.

    Args:
        tensor: what comes in.
        frees: do not hold its memory until the backward pass.
    """
    if not frees:
        leaf = tensor.detach().requires_grad_()
        return leaf, leaf
    entrance = Entrance(tensor)
    token = torch.empty(0, device=tensor.device, requires_grad=True)
    return _Enter.apply(token, tensor, entrance), entrance  # type: ignore[no-untyped-call]


def gradient_at(entered: torch.Tensor | Entrance) -> torch.Tensor:
    """Returns the gradient that has arrived; zeros if none did."""
    if isinstance(entered, Entrance):
        return entered.zeros() if entered.gradient is None else entered.gradient
    return torch.zeros_like(entered) if entered.grad is None else entered.grad


def leave(tensor: torch.Tensor, *, frees: bool) -> torch.Tensor | GradientEdge:
    """Returns what to keep of a tensor that goes out.

    Args:
        tensor: what goes out.
        frees: do not hold its memory until the backward pass.
    """
    return get_gradient_edge(tensor) if frees and tensor.requires_grad else tensor
