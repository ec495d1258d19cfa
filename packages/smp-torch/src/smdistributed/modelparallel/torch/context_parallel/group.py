"""What the ranks exchange that share a sequence.

The objective that is differentiated is the mean of the losses of the ranks, which are all the same
number. Each exchange has its true adjoint as backward pass, so the mean of the ranks' gradients of
a parameter is its gradient, whether the parameter met pieces or, on every rank alike, wholes. That
mean is what replicas make anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, all_cut, joined


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

    def whole(self, piece: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Returns the whole that the pieces of all ranks are of. Collective: CP_GROUP."""
        whole: torch.Tensor = _Gather.apply(piece, layout, self.collectives)  # type: ignore[no-untyped-call]
        return whole

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the tensors of all ranks. Collective: CP_GROUP."""
        total: torch.Tensor = _Sum.apply(part, self.collectives)  # type: ignore[no-untyped-call]
        return total


class _Gather(torch.autograd.Function):
    """The whole that each rank has a piece of; its adjoint sums the gradients of the own one."""

    @staticmethod
    def forward(
        ctx: Any, piece: torch.Tensor, layout: Layout, collectives: Collectives
    ) -> torch.Tensor:
        ctx.layout, ctx.collectives = layout, collectives
        pieces = collectives.gather(piece.unsqueeze(0), [1] * collectives.size)
        return joined(pieces.unbind(), layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        collectives: Collectives = ctx.collectives
        gradients = all_cut(gradient, ctx.layout, collectives.size)
        return collectives.scatter_sum(gradients, [1] * collectives.size).squeeze(0), None, None


class _Sum(torch.autograd.Function):
    """The sum of the tensors of all ranks; its adjoint sums their gradients."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        ctx.collectives = collectives
        return collectives.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.collectives.sum(gradient), None
