"""Where the shards of a model lie, and how a unit becomes whole from those of all ranks.

There are two ways. Everywhere ranks can send their shards to each other, for which all of them have
to take part at a time. GPUs of one host read each other's memory: then a rank makes a unit whole by
itself, by copies that hold no multiprocessor, and all that the ranks have to agree on is when
shards may be read and when they may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.collectives.symmetric_memory import (
    MakeMemory,
    SymmetricMemory,
)
from smdistributed.modelparallel.torch.compat.private.distributed import (
    all_gather_each_into,
    all_gather_into,
)
from smdistributed.modelparallel.torch.sharding.layout import is_large
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import Unit

#: Of where a shard begins, in bytes.
_ALIGNMENT = 256


class ShardMemory(Protocol):
    """The memory of the shards of one model.

    Attributes:
        is_common: whether all ranks have to make the same unit whole at a time.
    """

    is_common: bool

    def take(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Returns zeros for the shards of new units. Collective: the sharding group.

        Args:
            sizes: elements and type of each, in the order of the units.
        """

    def gathering(
        self, unit: Unit, memory: torch.Tensor
    ) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """Returns what makes a unit whole, and what it uses besides.

        Args:
            unit: of the model.
            memory: takes the whole parameters one after another. Shape: (num_elements,).
        """

    def barrier(self) -> None:
        """What is given to the current stream after it runs when all ranks have come to theirs."""


def shard_memory(groups: ShardingGroups, device: torch.device) -> ShardMemory:
    """Returns memory for the shards of one model."""
    if groups.make_memory is None:
        return SentShards(groups, device)
    return ReadShards(groups.make_memory, groups.degree, groups.index)


class SentShards:
    """Shards that the ranks send to each other.

    Args:
        groups: who exchanges.
        device: where the shards are.
    """

    is_common = True

    def __init__(self, groups: ShardingGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def take(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """See ``ShardMemory.take``."""
        return [torch.zeros(count, dtype=dtype, device=self._device) for count, dtype in sizes]

    def gathering(
        self, unit: Unit, memory: torch.Tensor
    ) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """See ``ShardMemory.gathering``. Collective: the sharding group."""
        if unit.layout.is_in_order and self._groups.within_host is None:
            return lambda: gather_in_order(self._groups, unit, memory), []
        shards = unit.shard.new_empty((self._groups.degree, unit.shard.numel()))

        def gather() -> None:
            gather_shards(self._groups, unit.shard, shards)
            unit.lay_out(shards, memory)

        return gather, [shards]

    def barrier(self) -> None:
        """Needs none: who has what others sent is not disturbed by what they write later."""


class ReadShards:
    """Shards that the ranks read from each other.

    Args:
        make: makes memory that all ranks read and write.
        degree: how many ranks there are.
        index: which of them this is.
    """

    is_common = False

    def __init__(self, make: MakeMemory, degree: int, index: int) -> None:
        self._make = make
        self._degree = degree
        self._index = index
        #: Memory and its first byte, by number of the unit.
        self._places: list[tuple[SymmetricMemory, int]] = []
        self._sources: dict[int, list[tuple[int, Rectangle, torch.Tensor]]] = {}

    def take(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """See ``ShardMemory.take``."""
        starts, end = [], 0
        for count, dtype in sizes:
            starts.append(end)
            end += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not sizes:
            return []
        memory = self._make(end)
        self._places += [(memory, start) for start in starts]
        return [
            memory.piece(self._index, start, count, dtype).zero_()
            for start, (count, dtype) in zip(starts, sizes, strict=True)
        ]

    def gathering(
        self, unit: Unit, memory: torch.Tensor
    ) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """See ``ShardMemory.gathering``."""
        sources = self._sources.get(unit.number)
        if sources is None:
            sources = self._sources[unit.number] = self._blocks(unit)
        views = unit.layout.views(memory)

        def gather() -> None:
            for number, part, values in sources:
                views[number][part.within(Rectangle.whole(views[number].shape))].copy_(values)

        return gather, []

    def _blocks(self, unit: Unit) -> list[tuple[int, Rectangle, torch.Tensor]]:
        """Returns number of the parameter, block, and its values, of all ranks; the own ones last.

        The others come in an order in which not all ranks read from one at a time.
        """
        memory, start = self._places[unit.number]
        found = []
        for distance in range(1, self._degree + 1):
            rank = (self._index + distance) % self._degree
            shard = memory.piece(rank, start, unit.shard.numel(), unit.dtype)
            found += [each for each in unit.layout.blocks_of(rank, shard) if each[1].num_elements]
        return found

    def barrier(self) -> None:
        """See ``ShardMemory.barrier``: of one memory it is a barrier of the device."""
        if self._places:
            self._places[0][0].barrier()


def gather_in_order(groups: ShardingGroups, unit: Unit, memory: torch.Tensor) -> None:
    """Gathers the blocks of each parameter in its place. Collective: the sharding group.

    Args:
        groups: who exchanges.
        unit: whose blocks, one after another, are the parameters.
        memory: takes the whole parameters. Shape: (num_elements,).
    """
    views = unit.layout.views(memory)
    pairs = [
        (whole.view(-1), block.view(-1))
        for whole, block in zip(views, unit.blocks_of(unit.shard), strict=True)
    ]
    small = [pair for pair in pairs if not is_large(pair[0].numel())]
    with groups.blaming("gathering parameters with"):
        for whole, block in pairs:
            if is_large(whole.numel()):
                all_gather_into(whole, block, groups.gathering)
        if small:
            wholes, blocks = zip(*small, strict=True)
            all_gather_each_into(wholes, blocks, groups.gathering)


def gather_shards(groups: ShardingGroups, shard: torch.Tensor, shards: torch.Tensor) -> None:
    """Gathers the shards of all ranks. Collective: the sharding group.

    Args:
        groups: who exchanges.
        shard: of this rank. Shape: (width,).
        shards: takes those of all ranks. Shape: (degree, width).
    """
    with groups.blaming("gathering parameters with"):
        if groups.within_host is None or groups.across_hosts is None:
            all_gather_into(shards.view(-1), shard, groups.gathering)
            return
        # A shard crosses between hosts once for each rank, not once for each pair.
        num_hosts = dist.get_world_size(groups.across_hosts)
        across = shard.new_empty((num_hosts, shard.numel()))
        all_gather_into(across.view(-1), shard, groups.across_hosts)
        found = shard.new_empty((groups.degree // num_hosts, *across.shape))
        all_gather_into(found.view(-1), across.view(-1), groups.within_host)
        # Which has ranks of a host outside, and hosts inside.
        shards.copy_(found.transpose(0, 1).reshape(shards.shape))


def gather_blocks(
    groups: ShardingGroups, parts: Sequence[Rectangle], block: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Returns the whole of one tensor. Collective: the sharding group.

    Args:
        groups: who exchanges.
        parts: of it that the ranks have.
        block: of this rank.
        shape: of the whole.
    """
    own = block.new_zeros(max(part.num_elements for part in parts))
    own[: block.numel()] = block.reshape(-1)
    found = own.new_empty((groups.degree, own.numel()))
    with groups.blaming("gathering parameters with"):
        all_gather_into(found.view(-1), own, groups.gathering)
    whole = own.new_empty(shape)
    for part, values in zip(parts, found, strict=True):
        index = part.within(Rectangle.whole(shape))
        whole[index] = values[: part.num_elements].view(part.sizes)
    return whole
