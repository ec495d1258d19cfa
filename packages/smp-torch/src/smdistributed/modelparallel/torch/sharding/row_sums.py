"""How gradients reach the shards: each rank gets the sum of the rows that are its own.

Every rank has one row for each rank. Everywhere ranks can send these rows to each other. GPUs of
one host write each block of a row into the memory of its rank, by copies that hold no
multiprocessor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from smdistributed.modelparallel.torch.collectives.alternating_buffers import AlternatingBuffers
from smdistributed.modelparallel.torch.compat.private.fusion import fused
from smdistributed.modelparallel.torch.sharding.messages import Message
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups

_DOING = "summing gradients with"


class RowSums(Protocol):
    """What makes sums of one model; they are made one after another, on one stream."""

    def summing(
        self, message: Message, total: torch.Tensor
    ) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """Returns what sums a message over the ranks, and what it uses besides.

        Each sum is made in the order of the ranks. Collective: the sharding group, as is the call
        of what it returns.

        Args:
            message: the gradients of this rank.
            total: takes the sum of the own row, divided, in its own type, fp32 at least.
                Shape: (width,).
        """


def row_sums(groups: ShardingGroups, device: torch.device, most_elements: int) -> RowSums:
    """Returns what makes the sums of one model.

    Args:
        groups: who exchanges.
        device: where the gradients are.
        most_elements: that travel in one message.
    """
    if groups.make_memory is None:
        return SentRowSums(groups, max(most_elements // groups.degree, 1))
    synchronize = functools.partial(torch.cuda.synchronize, device)
    buffers = AlternatingBuffers(groups.make_memory, groups.collectives, synchronize)
    return WrittenRowSums(groups, buffers)


class SentRowSums:
    """Sums of rows that the ranks send to each other.

    Args:
        groups: who exchanges.
        most_columns: that travel in one message.
    """

    def __init__(self, groups: ShardingGroups, most_columns: int) -> None:
        self._groups = groups
        self._most_columns = most_columns

    def summing(
        self, message: Message, total: torch.Tensor
    ) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """See ``RowSums.summing``."""
        shape = (self._groups.degree, message.width)
        rows = torch.empty(shape, dtype=message.dtype, device=message.device)

        def sum_up() -> None:
            message.pack(rows)
            for given, part in zip(
                torch.split(rows, self._most_columns, 1),
                torch.split(total, self._most_columns),
                strict=True,
            ):
                _sum_up(part, message.divisor, *self._groups.collectives.exchange_rows(given))

        return sum_up, [rows]


class WrittenRowSums:
    """Sums of rows that the ranks write into each other's memory.

    Args:
        groups: who they are.
        buffers: memory that they write to.
    """

    def __init__(self, groups: ShardingGroups, buffers: AlternatingBuffers) -> None:
        self._groups = groups
        self._buffers = buffers

    def summing(
        self, message: Message, total: torch.Tensor
    ) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """See ``RowSums.summing``."""
        degree, index = self._groups.degree, self._groups.index
        with self._groups.blaming(_DOING):
            parts = self._buffers.next_parts(message.width * message.dtype.itemsize)

        def row(giver: int, taker: int) -> torch.Tensor:
            return parts.between(giver, taker, message.width, message.dtype)

        def sum_up() -> None:
            if not message.is_full:
                total.zero_()
            with self._groups.blaming(_DOING):
                # In an order in which not all write to one at a time.
                for taker in ((index + distance) % degree for distance in range(1, degree)):
                    for place, given in message.blocks_of(taker, row(index, taker)):
                        place.zero_() if given is None else place.copy_(given)
                parts.memory.barrier()
            got = {
                giver: [place for place, _ in message.blocks_of(index, row(giver, index))]
                for giver in range(degree)
                if giver != index
            }
            for number, (into, own) in enumerate(message.blocks_of(index, total)):
                blocks = {giver: places[number] for giver, places in got.items()}
                if own is not None:
                    blocks[index] = own
                rows = (blocks[each].reshape(-1) for each in sorted(blocks))
                _sum_up(into.view(-1), message.divisor, *rows)

        return sum_up, []


@fused
def _sum_up(total: torch.Tensor, divisor: int, *rows: torch.Tensor) -> None:
    """Makes a total the sum of rows, in its own type, divided."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
    if divisor > 1:
        total.div_(divisor)
