"""A message: the gradients of some units that are reduced together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.sharding.layout import is_large
from smdistributed.modelparallel.torch.sharding.unit import Unit

_Block = TypeVar("_Block")


class Message:
    """Whole gradients of the parameters of some units, in parcels for each rank.

    A parcel is a large block of the rank, or all of its small ones, one after another.

    Args:
        units: of one type, of which as many ranks have copies.
        gradients: of each unit, by place of the parameter; a missing one counts as zero.
        divisor: of their sum.

    Attributes:
        units: as given.
        divisor: as given.
        widths: elements of the shard of each unit.
        width: of all units.
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
        """Whether the blocks of each rank fill its shards."""
        return all(unit.layout.is_full for unit in self.units)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The gradients."""
        return [each for given in self._gradients for each in given.values()]

    def parcels_of(self, rank: int) -> list[torch.Tensor]:
        """Returns the gradients for a rank. Shape of each: (elements,)."""
        return [
            parcel[0] if len(parcel) == 1 else torch.cat(parcel)
            for parcel in _parcels(self._gradients_of(rank), torch.Tensor.numel)
        ]

    def sizes_of(self, rank: int) -> list[int]:
        """Returns how many elements each parcel for a rank has."""
        sizes = (part.num_elements for unit in self.units for part, _ in unit.layout.places(rank))
        return [sum(parcel) for parcel in _parcels(sizes, int)]

    def names_of(self, rank: int) -> list[list[tuple[int, int]]]:
        """Returns the numbers of the units and their parameters that each parcel has blocks of."""
        blocks = [
            ((unit.number, number), part.num_elements)
            for unit in self.units
            for number, (part, _) in enumerate(unit.layout.places(rank))
        ]
        return [[name for name, _ in parcel] for parcel in _parcels(blocks, lambda each: each[1])]

    def places_of(self, rank: int, shards: torch.Tensor) -> list[list[torch.Tensor]]:
        """Returns where the blocks of each parcel for a rank belong. Shape of each: (elements,).

        Args:
            rank: whose.
            shards: of that rank, of all units. Shape: (width,).
        """
        places = (
            place.view(-1)
            for unit, shard in zip(self.units, torch.split(shards, self.widths), strict=True)
            for _, _, place in unit.layout.blocks_of(rank, shard)
        )
        return _parcels(places, torch.Tensor.numel)

    def _gradients_of(self, rank: int) -> Iterator[torch.Tensor]:
        """Yields the gradient of each block of a rank, flat."""
        for unit, given in zip(self.units, self._gradients, strict=True):
            for number, (part, _) in enumerate(unit.layout.places(rank)):
                whole = given.get(number)
                if whole is None:
                    yield torch.zeros(part.num_elements, dtype=self.dtype, device=self.device)
                else:
                    yield whole[part.within(Rectangle.whole(whole.shape))].reshape(-1)


def _parcels(blocks: Iterable[_Block], size_of: Callable[[_Block], int]) -> list[list[_Block]]:
    """Returns which blocks each parcel has: a large one, and the last one all small ones."""
    parcels, small = [], []
    for each in blocks:
        if is_large(size_of(each)):
            parcels.append([each])
        elif size_of(each):
            small.append(each)
    return [*parcels, small] if small else parcels
