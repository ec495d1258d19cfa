"""How gradients reach the shards: each rank gets the sum of what all ranks have for it.

Everywhere ranks can send each other the parcels of a message. GPUs of one host write them into the
memory of their rank, by copies that hold no multiprocessor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from smdistributed.modelparallel.torch.collectives.alternating_buffers import AlternatingBuffers
from smdistributed.modelparallel.torch.compat.private.fusion import fused
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all
from smdistributed.modelparallel.torch.sharding.messages import Message
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups

_DOING = "summing gradients with"

#: Gives each rank its parcels, and returns what the other ones gave this one.
Deliver = Callable[[], Mapping[int, Sequence[torch.Tensor]]]


class Delivery(Protocol):
    """What brings parcels to the ranks that they are for."""

    def prepare(self, message: Message) -> Deliver:
        """Returns what delivers a message. Collective: the sharding group, as is its call."""


def row_sums(groups: ShardingGroups, device: torch.device) -> RowSums:
    """Returns what makes the sums of one model.

    Args:
        groups: who exchanges.
        device: where the gradients are.
    """
    if groups.make_memory is None:
        return RowSums(groups, SentParcels(groups))
    synchronize = functools.partial(torch.cuda.synchronize, device)
    buffers = AlternatingBuffers(groups.make_memory, groups.collectives, synchronize)
    return RowSums(groups, WrittenParcels(groups, buffers))


class RowSums:
    """Sums of one model; they are made one after another, on one stream.

    Args:
        groups: who exchanges.
        delivery: between them.
    """

    def __init__(self, groups: ShardingGroups, delivery: Delivery) -> None:
        self._groups = groups
        self._delivery = delivery

    def summing(self, message: Message, total: torch.Tensor) -> Callable[[], object]:
        """Returns what sums a message over the ranks, in their order.

        Collective: the sharding group, as is the call of what it returns.

        Args:
            message: the gradients of this rank.
            total: takes the sums for this rank, divided, as its shards lie. Its type is fp32 at
                least. Shape: (width,).
        """
        index = self._groups.index
        with self._groups.blaming(_DOING):
            deliver = self._delivery.prepare(message)

        def sum_up() -> None:
            if not message.is_full:
                total.zero_()
            with self._groups.blaming(_DOING):
                found = {**deliver(), index: message.parcels_of(index)}
            ranks = (found[each] for each in sorted(found))
            for places, *parcels in zip(message.places_of(index, total), *ranks, strict=True):
                if len(places) == 1:
                    _sum_up(places[0], message.divisor, *parcels)
                else:
                    sums = torch.empty_like(parcels[0], dtype=total.dtype)
                    _sum_up(sums, message.divisor, *parcels)
                    copy_all(places, torch.split(sums, [each.numel() for each in places]))

        return sum_up


class SentParcels:
    """Parcels that the ranks send to each other.

    Args:
        groups: who exchanges.
    """

    def __init__(self, groups: ShardingGroups) -> None:
        self._groups = groups

    def prepare(self, message: Message) -> Deliver:
        """See ``Delivery.prepare``."""
        others = _others(self._groups)

        def deliver() -> dict[int, list[torch.Tensor]]:
            sent = {taker: message.parcels_of(taker) for taker in others}
            found = {
                giver: [
                    torch.empty(size, dtype=message.dtype, device=message.device)
                    for size in message.sizes_of(self._groups.index)
                ]
                for giver in others
            }
            self._groups.collectives.exchange(sent, found)
            return found

        return deliver


class WrittenParcels:
    """Parcels that the ranks write into each other's memory.

    Args:
        groups: who they are.
        buffers: memory that they write to.
    """

    def __init__(self, groups: ShardingGroups, buffers: AlternatingBuffers) -> None:
        self._groups = groups
        self._buffers = buffers

    def prepare(self, message: Message) -> Deliver:
        """See ``Delivery.prepare``."""
        index, others = self._groups.index, _others(self._groups)
        parts = self._buffers.next_parts(message.width * message.dtype.itemsize)

        def parcels(giver: int, taker: int) -> Sequence[torch.Tensor]:
            sizes = message.sizes_of(taker)
            return torch.split(parts.between(giver, taker, sum(sizes), message.dtype), sizes)

        def deliver() -> dict[int, Sequence[torch.Tensor]]:
            for taker in others:
                for place, parcel in zip(
                    parcels(index, taker), message.parcels_of(taker), strict=True
                ):
                    place.copy_(parcel)
            parts.memory.barrier()
            return {giver: parcels(giver, index) for giver in others}

        return deliver


def _others(groups: ShardingGroups) -> list[int]:
    """Returns the other ranks, in an order in which not all turn to one at a time."""
    return [(groups.index + distance) % groups.degree for distance in range(1, groups.degree)]


@fused
def _sum_up(total: torch.Tensor, divisor: int, *rows: torch.Tensor) -> None:
    """Makes a total the sum of rows, in its own type, divided."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
    if divisor > 1:
        total.div_(divisor)
