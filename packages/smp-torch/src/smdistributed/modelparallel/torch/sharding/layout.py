"""Which parameters are gathered together, and how a rank's blocks of them lie in memory.

A parameter is cut into blocks of rows, one for each rank of a sharding group; the blocks of a rank
lie one after another in one tensor, its *shard* of the unit. Blocks may differ by one row, so
shards are padded to the longest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.common.pieces import Rectangle

#: Elements of a parameter or block that is exchanged by itself. Of an exchange of many tensors NCCL
#: takes the protocol that is good for the small ones.
_LARGE = 1 << 20


def is_large(num_elements: int) -> bool:
    """Whether that many elements are exchanged as they lie, and not beside smaller ones."""
    return num_elements >= _LARGE


def cut_dim(shape: Sequence[int], degree: int) -> int:
    """Returns along which dim a tensor is cut: by rows, unless there are fewer than ranks."""
    return 0 if shape[0] >= degree else shape.index(max(shape))


def block(shape: Sequence[int], degree: int, index: int) -> Rectangle:
    """Returns the block of a parameter that one rank of a sharding group has."""
    return Rectangle.whole(shape).cut(cut_dim(shape, degree), degree, index)


def is_cut(shape: Sequence[int], dtype: torch.dtype, threshold: int) -> bool:
    """Tells whether a parameter is cut into blocks; else it stays whole on every rank.

    Args:
        shape: of what a rank would hold of it.
        dtype: its type.
        threshold: parameters with fewer elements stay whole.
    """
    is_number = dtype.is_floating_point or dtype.is_complex
    return is_number and len(shape) > 0 and math.prod(shape) >= max(threshold, 1)


@dataclass(frozen=True)
class UnitLayout:
    """How the blocks of some parameters lie in the shards of a sharding group.

    Attributes:
        shapes: of the parameters.
        degree: how many ranks share them.
    """

    shapes: tuple[tuple[int, ...], ...]
    degree: int

    @property
    def num_elements(self) -> int:
        """Of all parameters."""
        return sum(map(math.prod, self.shapes))

    @property
    def width(self) -> int:
        """Elements of a shard, the longest one."""
        return max(
            sum(block(shape, self.degree, rank).num_elements for shape in self.shapes)
            for rank in range(self.degree)
        )

    @property
    def is_full(self) -> bool:
        """Whether the blocks of every rank fill its shard."""
        return self.width * self.degree == self.num_elements

    @property
    def is_in_order(self) -> bool:
        """Whether the blocks of all ranks, one after another, are a parameter, for each of them."""
        return all(
            cut_dim(shape, self.degree) == 0 and shape[0] % self.degree == 0
            for shape in self.shapes
        )

    def places(self, rank: int) -> Iterator[tuple[Rectangle, int]]:
        """Yields for each parameter the block of a rank, and where it begins in the shard."""
        start = 0
        for shape in self.shapes:
            part = block(shape, self.degree, rank)
            yield part, start
            start += part.num_elements

    def blocks(self, shards: torch.Tensor) -> Iterator[tuple[int, Rectangle, torch.Tensor]]:
        """Yields number of the parameter, block and view of it, of all ranks.

        Args:
            shards: of all ranks. Shape: (degree, width).
        """
        for rank in range(self.degree):
            yield from self.blocks_of(rank, shards[rank])

    def blocks_of(
        self, rank: int, shard: torch.Tensor
    ) -> Iterator[tuple[int, Rectangle, torch.Tensor]]:
        """Yields number of the parameter, block and view of it, of one rank.

        Args:
            rank: whose.
            shard: of that rank. Shape: (width,).
        """
        for number, (part, start) in enumerate(self.places(rank)):
            yield number, part, shard[start : start + part.num_elements].view(part.sizes)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Returns the whole parameters in a flat tensor that holds them one after another."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = torch.split(memory, sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def group_names(sizes: Sequence[tuple[str, int]], budget: int) -> list[list[str]]:
    """Distributes parameters over units: the largest modules that have at most ``budget`` elements.

    A module that has more is taken apart: its children, and what it holds itself.

    Args:
        sizes: dotted name and number of elements of each parameter, in the order of the model.
        budget: of a unit; a single parameter may be larger.
    """
    return list(_grouped(list(sizes), 0, budget))


def _grouped(sizes: Sequence[tuple[str, int]], depth: int, budget: int) -> Iterator[list[str]]:
    if sum(size for _, size in sizes) <= budget or len(sizes) == 1:
        yield [name for name, _ in sizes]
        return

    def child(item: tuple[str, int]) -> str:
        parts = item[0].split(".")
        return parts[depth] if len(parts) > depth + 1 else ""

    children = [list(items) for _, items in itertools.groupby(sizes, key=child)]
    for items in children:
        if len(items) == 1 or child(items[0]):
            yield from _grouped(items, depth + 1, budget)
        else:  # what the module holds itself
            yield from _within(items, budget)


def _within(sizes: Sequence[tuple[str, int]], budget: int) -> Iterator[list[str]]:
    """Yields neighbours that have at most ``budget`` elements together."""
    names: list[str] = []
    total = 0
    for name, size in sizes:
        if names and total + size > budget:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
