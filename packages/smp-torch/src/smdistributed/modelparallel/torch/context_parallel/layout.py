"""Where the pieces of a tensor are whose sequence several ranks share.

Of ``n`` ranks, rank ``r`` has the blocks ``r`` and ``2n - 1 - r`` of ``2n`` equal ones. Under a
causal mask a query reads all keys before it, so the first block costs least and the last one most:
two such blocks are the same work for every rank.

What lacks tokens of a sequence, or has some before or after it, is a window on it: each token stays
where it is in the sequence, so that ``logits[:, :-1]`` moves none, nor does a token put before the
others, nor ``x[:, 1:]`` after it. Pieces of a window may be of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: So many blocks of a sequence a rank has.
BLOCKS = 2


@dataclass(frozen=True)
class Window:
    """Some tokens of a sequence, one after the other.

    Attributes:
        frame: length of the sequence, which has equal blocks.
        start: where the window begins; what is before the sequence belongs to its first block.
        stop: where it ends; what is after the sequence belongs to its last block.
    """

    frame: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A dim along which a tensor is cut.

    Attributes:
        dim: which; not negative.
        outer: how many sequences lie one after the other along it: ``(B, S)`` is cut along dim 1,
            and flattened to ``(B * S,)`` along dim 0 with ``outer`` B.
        window: which tokens of a sequence these are; None for all, in equal blocks.
    """

    dim: int
    outer: int = 1
    window: Window | None = None

    def length_of(self, whole: torch.Size) -> int:
        """Returns how long the sequences of a tensor are; of flattened channels a multiple."""
        return len(self.window) if self.window else whole[self.dim] // self.outer

    def divides(self, size: int, num_ranks: int) -> bool:
        """Whether a dim of this size can be cut."""
        tokens = BLOCKS * num_ranks if self.window is None else len(self.window)
        return size > 0 and size % (self.outer * tokens) == 0

    def spans(self, size: int, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Returns where the blocks of a rank begin and end in a sequence.

        Args:
            size: of the dim of the whole.
            rank: whose.
            num_ranks: that share it.
        """
        length = size // self.outer
        last = BLOCKS * num_ranks
        return [
            (self._edge(at, length, last), self._edge(at + 1, length, last))
            for at in (rank, last - 1 - rank)
        ]

    def size_of(self, size: int, rank: int, num_ranks: int) -> int:
        """Returns the size of the dim of a rank's piece; see ``spans``."""
        return self.outer * sum(end - start for start, end in self.spans(size, rank, num_ranks))

    def _edge(self, block: int, length: int, last: int) -> int:
        """Returns where a block begins in a sequence of some length, of so many blocks."""
        window = self.window
        if window is None:
            return block * length // last
        if block in (0, last):
            return length if block else 0
        at = block * window.frame // last - window.start
        return min(max(at, 0), len(window)) * (length // len(window))


def sequence_of(dim: int, length: int, num_ranks: int) -> Layout:
    """Returns how a sequence of any length is cut: the last blocks may be shorter than others."""
    frame = length + -length % (BLOCKS * num_ranks)
    return Layout(dim, 1, None if frame == length else Window(frame, 0, length))


def cut(whole: torch.Tensor, layout: Layout, rank: int, num_ranks: int) -> torch.Tensor:
    """Returns the piece of a rank.

    Shape: ``layout.dim`` is shorter, by a factor of ``num_ranks`` if there is no window.
    """
    dim, size = layout.dim, whole.shape[layout.dim]
    sequences = torch.unflatten(whole, dim, (layout.outer, size // layout.outer))
    own = [
        sequences.narrow(dim + 1, start, end - start)
        for start, end in layout.spans(size, rank, num_ranks)
    ]
    return torch.cat(own, dim + 1).flatten(dim, dim + 1)


def joined(pieces: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Returns the whole that the pieces of all ranks are of, in the order of ranks."""
    dim = layout.dim
    size = sum(each.shape[dim] for each in pieces)
    firsts: list[torch.Tensor] = []
    seconds: list[torch.Tensor] = []
    for rank, piece in enumerate(pieces):
        lengths = [end - start for start, end in layout.spans(size, rank, len(pieces))]
        sequences = torch.unflatten(piece, dim, (layout.outer, sum(lengths)))
        first, second = torch.split(sequences, lengths, dim + 1)
        firsts.append(first)
        seconds.insert(0, second)
    return torch.cat([*firsts, *seconds], dim + 1).flatten(dim, dim + 1)


def all_cut(whole: torch.Tensor, layout: Layout, num_ranks: int) -> torch.Tensor:
    """Returns the numbers of the pieces of all ranks, one after the other.

    Shape: ``(whole.numel(),)``.
    """
    dim, size = layout.dim, whole.shape[layout.dim]
    shapes = shapes_of_pieces(whole.shape, layout, num_ranks)
    flat = whole.new_empty(whole.numel())
    pieces = torch.split(flat, [each.numel() for each in shapes])
    sequences = torch.unflatten(whole, dim, (layout.outer, size // layout.outer))
    for rank, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
        spans = layout.spans(size, rank, num_ranks)
        lengths = [end - start for start, end in spans]
        own = torch.unflatten(piece.view(shape), dim, (layout.outer, sum(lengths)))
        for part, (start, end) in zip(torch.split(own, lengths, dim + 1), spans, strict=True):
            part.copy_(sequences.narrow(dim + 1, start, end - start))
    return flat


def shapes_of_pieces(whole: torch.Size, layout: Layout, num_ranks: int) -> list[torch.Size]:
    """Returns the shapes of the pieces of all ranks."""
    shapes = []
    for rank in range(num_ranks):
        shape = list(whole)
        shape[layout.dim] = layout.size_of(whole[layout.dim], rank, num_ranks)
        shapes.append(torch.Size(shape))
    return shapes


def shares_of(
    wholes: Sequence[torch.Size], layouts: Sequence[Layout | None], num_ranks: int
) -> tuple[float, ...] | None:
    """Returns which part of the tokens each rank has; None if tensors differ in that.

    Args:
        wholes: shapes of tensors.
        layouts: how each is cut; None: not at all.
        num_ranks: that share them.
    """
    found = {
        tuple(
            layout.size_of(shape[layout.dim], rank, num_ranks) / shape[layout.dim]
            for rank in range(num_ranks)
        )
        for shape, layout in zip(wholes, layouts, strict=True)
        if layout is not None
    }
    return found.pop() if len(found) == 1 else None
