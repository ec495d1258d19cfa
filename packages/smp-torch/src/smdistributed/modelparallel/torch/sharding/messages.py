"""A message: the gradients of some units that are reduced together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all
from smdistributed.modelparallel.torch.sharding.unit import Unit


class Message:
    """Whole gradients of the parameters of some units, in one row for each rank.

    Args:
        units: of one type, of which as many ranks have copies.
        gradients: of each unit, by place of the parameter; a missing one counts as zero.
        divisor: of their sum.

    Attributes:
        units: as given.
        divisor: as given.
        widths: elements of each unit in a row.
        width: elements of a row.
        dtype: of the gradients.
        device: where they are.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[Mapping[int, torch.Tensor]],
        divisor: int,
    ) -> None:
        self.units = units
        self.divisor = divisor
        self.widths = [unit.shard.numel() for unit in units]
        self.width = sum(self.widths)
        self.dtype = units[0].dtype
        self.device = units[0].shard.device
        self._gradients = gradients

    @property
    def is_full(self) -> bool:
        """Whether the blocks of each rank fill its row."""
        return all(unit.layout.is_full for unit in self.units)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The gradients."""
        return [each for given in self._gradients for each in given.values()]

    def blocks_of(
        self, rank: int, row: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yields where each block of a rank lies in its row, and the gradient's, if there is one.

        Args:
            rank: whose.
            row: of that rank. Shape: (width,).
        """
        shards = torch.split(row, self.widths)
        for unit, given, shard in zip(self.units, self._gradients, shards, strict=True):
            for number, part, place in unit.layout.blocks_of(rank, shard):
                if part.num_elements:
                    whole = given.get(number)
                    if whole is not None:
                        whole = whole[part.within(Rectangle.whole(whole.shape))]
                    yield place, whole

    def pack(self, rows: torch.Tensor) -> None:
        """Lays the gradients out as rows.

        Args:
            rows: of all ranks. Shape: (degree, width).
        """
        blocks = [each for rank, row in enumerate(rows) for each in self.blocks_of(rank, row)]
        found = [(place, block) for place, block in blocks if block is not None]
        if len(found) < len(blocks) or not self.is_full:
            rows.zero_()
        if found:
            places, gradients = zip(*found, strict=True)
            copy_all(places, gradients)
