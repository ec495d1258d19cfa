"""What the ranks exchange that share a sequence.

The objective that is differentiated is the mean of the losses of the ranks, which are all the same
number. Each exchange has its true adjoint as backward pass, so the mean of the ranks' gradients of
a parameter is its gradient, whether the parameter met pieces or, on every rank alike, wholes. That
mean is what replicas make anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.context_parallel.layout import (
    Layout,
    all_cut,
    joined,
    shapes_of_pieces,
)


class ContextGroup:
    """The ranks that share the sequences of a batch.

    Args:
        collectives: exchanges between them.

    Attributes:
        size: how many they are.
        rank: which of them this is.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.size = collectives.size
        self.rank = collectives.rank

    def whole(self, piece: torch.Tensor, size: int, layout: Layout) -> torch.Tensor:
        """Returns the whole that the pieces of all ranks are of. Collective: CP_GROUP.

        Args:
            piece: of this rank.
            size: of the dim that is cut, of the whole.
            layout: how it is cut.
        """
        whole: torch.Tensor = _Gather.apply(piece, size, layout, self.collectives)  # type: ignore[no-untyped-call]
        return whole

    def swap(
        self, sent: torch.Tensor, dim: int, given: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        """Gives ranks tokens, and returns those that they have given. Collective: CP_GROUP.

        Args:
            sent: the tokens for each rank, one after the other.
            dim: along which they lie.
            given: how many each rank gets.
            taken: how many each rank gives.
        """
        swapped: torch.Tensor = _Swap.apply(sent, dim, given, taken, self.collectives)  # type: ignore[no-untyped-call]
        return swapped

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the tensors of all ranks. Collective: CP_GROUP."""
        total: torch.Tensor = _Sum.apply(part, self.collectives)  # type: ignore[no-untyped-call]
        return total


class _Gather(torch.autograd.Function):
    """The whole that each rank has a piece of; its adjoint sums the gradients of the own one."""

    @staticmethod
    def forward(
        ctx: Any, piece: torch.Tensor, size: int, layout: Layout, collectives: Collectives
    ) -> torch.Tensor:
        whole = list(piece.shape)
        whole[layout.dim] = size
        shapes = shapes_of_pieces(torch.Size(whole), layout, collectives.size)
        ctx.layout, ctx.collectives, ctx.shapes = layout, collectives, shapes
        sizes = [each.numel() for each in shapes]
        pieces = torch.split(collectives.gather(piece.reshape(-1), sizes), sizes)
        return joined(
            [each.view(shape) for each, shape in zip(pieces, shapes, strict=True)], layout
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        collectives: Collectives = ctx.collectives
        gradients = all_cut(gradient, ctx.layout, collectives.size)
        own = collectives.scatter_sum(gradients, [each.numel() for each in ctx.shapes])
        return own.view(ctx.shapes[collectives.rank]), None, None, None


class _Swap(torch.autograd.Function):
    """Tokens that other ranks have given; its adjoint gives back their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: torch.Tensor,
        dim: int,
        given: Sequence[int],
        taken: Sequence[int],
        collectives: Collectives,
    ) -> torch.Tensor:
        ctx.dim, ctx.given, ctx.taken, ctx.collectives = dim, given, taken, collectives
        return _swapped(sent, dim, given, taken, collectives)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _swapped(gradient, ctx.dim, ctx.taken, ctx.given, ctx.collectives)
        return back, None, None, None, None


def _swapped(
    sent: torch.Tensor,
    dim: int,
    given: Sequence[int],
    taken: Sequence[int],
    collectives: Collectives,
) -> torch.Tensor:
    shapes = []
    for count in taken:
        shape = list(sent.shape)
        shape[dim] = count
        shapes.append(torch.Size(shape))
    # Process groups of the host know no truths.
    numbers = sent.to(torch.uint8) if sent.dtype == torch.bool else sent
    found = torch.cat(collectives.swap(torch.split(numbers, list(given), dim), shapes), dim)
    return found.to(sent.dtype)


class _Sum(torch.autograd.Function):
    """The sum of the tensors of all ranks; its adjoint sums their gradients."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        ctx.collectives = collectives
        return collectives.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.collectives.sum(gradient), None
