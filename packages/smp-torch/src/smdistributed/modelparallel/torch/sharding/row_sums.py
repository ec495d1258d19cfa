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
from smdistributed.modelparallel.torch.compat.fused import fused
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all
from smdistributed.modelparallel.torch.sharding.messages import Message
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups

#: Numbers whose squares a kernel sums at a time.
_ROW = 1024
_DOING = "summing gradients with"

#: Gives each rank its parcels, and returns what the other ones gave this one.
Deliver = Callable[[], Mapping[int, Sequence[torch.Tensor]]]


class Delivery(Protocol):
    """What brings parcels to the ranks that they are for."""

    def prepare(self, message: Message) -> Deliver:
        """Returns what delivers a message. Collective: the sharding group, as is its call."""


def row_sums(groups: ShardingGroups, device: torch.device, most_elements: int) -> RowSums:
    """Returns what makes the sums of one model.

    Args:
        groups: who exchanges.
        device: where the gradients are.
        most_elements: of all ranks that are sent at a time.
    """
    if groups.make_memory is None:
        return RowSums(groups, SentParcels(groups, max(most_elements // groups.degree, 1)))
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

    def summing(
        self, message: Message, total: torch.Tensor, squares: torch.Tensor | None
    ) -> Callable[[], object]:
        """Returns what sums a message over the ranks, in their order.

        Collective: the sharding group, as is the call of what it returns.

        Args:
            message: the gradients of this rank.
            total: takes the sums for this rank, divided, as its shards lie. Its type is fp32 at
                least. Shape: (width,).
            squares: takes the sum of the squares of each parcel's sums, where these are all that
                it has. Shape: (parcels,).
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
            for number, (places, *parcels) in enumerate(
                zip(message.places_of(index, total), *ranks, strict=True)
            ):
                is_alone = len(places) == 1
                sums = places[0] if is_alone else torch.empty_like(parcels[0], dtype=total.dtype)
                square = None if squares is None else squares[number]
                _sum_up(_by_rows(sums), square, message.divisor, *map(_by_rows, parcels))
                if not is_alone:
                    copy_all(places, torch.split(sums, [each.numel() for each in places]))

        return sum_up


class SentParcels:
    """Parcels that the ranks send to each other.

    Args:
        groups: who exchanges.
        most_elements: that a rank is sent at a time.
    """

    def __init__(self, groups: ShardingGroups, most_elements: int) -> None:
        self._groups = groups
        self._most_elements = most_elements

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
            given, taken = (
                {rank: _loads(parcels, self._most_elements) for rank, parcels in each.items()}
                for each in (sent, found)
            )
            # A rank's loads are cut by its parcels' sizes, which all ranks know.
            for number in range(max(map(len, (*given.values(), *taken.values())))):
                self._groups.collectives.exchange(
                    *(
                        {rank: loads[number] for rank, loads in each.items() if number < len(loads)}
                        for each in (given, taken)
                    )
                )
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


def _loads(parcels: Sequence[torch.Tensor], most_elements: int) -> list[list[torch.Tensor]]:
    """Distributes parcels over loads; one that is larger than a load is cut."""
    loads: list[list[torch.Tensor]] = []
    room = 0
    for piece in (piece for parcel in parcels for piece in torch.split(parcel, most_elements)):
        if piece.numel() > room:
            loads.append([])
            room = most_elements
        loads[-1].append(piece)
        room -= piece.numel()
    return loads


def _others(groups: ShardingGroups) -> list[int]:
    """Returns the other ranks, in an order in which not all turn to one at a time."""
    return [(groups.index + distance) % groups.degree for distance in range(1, groups.degree)]


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor in rows, whose length is the same for tensors of many sizes."""
    return tensor.view(-1, 1 if tensor.numel() % _ROW else _ROW)


@fused
def _sum_up(
    total: torch.Tensor, square: torch.Tensor | None, divisor: int, *rows: torch.Tensor
) -> None:
    """Makes a total the sum of rows, in its own type, divided; and its square that of its norm.

    As rows of one length, whatever their number, it all becomes one kernel.
    """
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
    if divisor > 1:
        total.div_(divisor)
    if square is not None:
        square.copy_(total.square().sum(1).sum())
