"""Where the pieces of a tensor are whose sequence several ranks share.

Of ``n`` ranks, rank ``r`` has the blocks ``r`` and ``2n - 1 - r`` of ``2n`` equal ones. Under a
causal mask a query reads all keys before it, so the first block costs least and the last one most:
two such blocks are the same work for every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: So many blocks of a sequence a rank has.
BLOCKS = 2


@dataclass(frozen=True)
class Layout:
    """A dim along which a tensor is cut.

    Attributes:
        dim: which; not negative.
        outer: how many sequences lie one after the other along it: ``(B, S)`` is cut along dim 1,
            and flattened to ``(B * S,)`` along dim 0 with ``outer`` B.
    """

    dim: int
    outer: int = 1

    def divides(self, size: int, num_ranks: int) -> bool:
        """Whether a dim of this size can be cut."""
        return size % (self.outer * BLOCKS * num_ranks) == 0 and size > 0


def cut(whole: torch.Tensor, layout: Layout, rank: int, num_ranks: int) -> torch.Tensor:
    """Returns the piece of a rank.

    Shape: ``layout.dim`` is shorter by a factor of ``num_ranks``.
    """
    dim = layout.dim
    blocks = torch.unflatten(whole, dim, (layout.outer, BLOCKS * num_ranks, -1))
    own = [blocks.narrow(dim + 1, at, 1) for at in (rank, BLOCKS * num_ranks - 1 - rank)]
    return torch.cat(own, dim + 1).flatten(dim, dim + 2)


def joined(pieces: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Returns the whole that the pieces of all ranks are of, in the order of ranks."""
    dim = layout.dim
    halves = [torch.unflatten(each, dim, (layout.outer, BLOCKS, -1)) for each in pieces]
    firsts = [each.narrow(dim + 1, 0, 1) for each in halves]
    seconds = [each.narrow(dim + 1, 1, 1) for each in reversed(halves)]
    return torch.cat([*firsts, *seconds], dim + 1).flatten(dim, dim + 2)


def all_cut(whole: torch.Tensor, layout: Layout, num_ranks: int) -> torch.Tensor:
    """Returns the pieces of all ranks, stacked along a new first dim."""
    dim = layout.dim
    shape = list(whole.shape)
    shape[dim] //= num_ranks
    pieces = whole.new_empty([num_ranks, *shape])
    halves = torch.unflatten(pieces, dim + 1, (layout.outer, BLOCKS, -1))
    blocks = torch.unflatten(whole, dim, (layout.outer, BLOCKS * num_ranks, -1))
    for rank in range(num_ranks):
        for half, place in enumerate((rank, BLOCKS * num_ranks - 1 - rank)):
            halves[rank].select(dim + 1, half).copy_(blocks.select(dim + 1, place))
    return pieces
