"""What the gradients between two tensors of a step are computed by, on one rank after another."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class _Entrance(torch.autograd.Function):
    """The identity; while it is closed, gradients do not flow on behind it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.is_closed = False
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if ctx.is_closed else gradient


@contextlib.contextmanager
def _closed(entrances: Sequence[torch.Tensor]) -> Iterator[None]:
    nodes: list[Any] = [each.grad_fn for each in entrances if each.grad_fn is not None]
    for node in nodes:
        node.is_closed = True
    try:
        yield
    finally:
        for node in nodes:
            node.is_closed = False


def entrance(tensor: torch.Tensor, creates_graph: bool) -> torch.Tensor:
    """Returns what is computed with in place of a tensor, for the gradient of that.

    Args:
        tensor: from before what is differentiated.
        creates_graph: gradients of the gradient flow on to the tensor.
    """
    if creates_graph and tensor.requires_grad:
        entered: torch.Tensor = _Entrance.apply(tensor)  # type: ignore[no-untyped-call]
        return entered
    return tensor.detach().requires_grad_()


def product(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    starts: Sequence[torch.Tensor],
    entrances: Sequence[torch.Tensor],
    creates_graph: bool,
) -> Sequence[torch.Tensor]:
    """Returns the gradients of inputs, of vectors by the Jacobian; zeros where nothing flows.

    Args:
        outputs: what is differentiated.
        inputs: what by.
        starts: the gradients of the outputs.
        entrances: behind which lies what is differentiated elsewhere. It may have a parameter among
            the inputs, too.
        creates_graph: the gradients can be differentiated.
    """
    pairs = [(out, start) for out, start in zip(outputs, starts, strict=True) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(each) for each in inputs]
    with _closed(entrances):
        return torch.autograd.grad(
            [out for out, _ in pairs],
            inputs,
            [start for _, start in pairs],
            create_graph=creates_graph,
            allow_unused=True,
            materialize_grads=True,
        )


def total(*gradients: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the gradients that come to a tensor: a tensor of its own."""
    return functools.reduce(operator.add, gradients) if len(gradients) > 1 else gradients[0].clone()


#: What computes a gradient in a forward pass.
DIFFERENTIATING = (torch.autograd.grad, product)
