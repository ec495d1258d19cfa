"""How gradients reach the shards: each rank gets the sum of the rows that are its own.

Every rank lays its gradients out as one row for each rank. Everywhere ranks can send these rows to
each other. GPUs of one host read them from each other's memory, by copies that hold no
multiprocessor.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from smdistributed.modelparallel.torch.collectives.alternating_buffers import AlternatingBuffers
from smdistributed.modelparallel.torch.collectives.symmetric_memory import SymmetricMemory
from smdistributed.modelparallel.torch.compat.private.fusion import fused
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups

_DOING = "summing gradients with"


class Rows(Protocol):
    """The rows of one sum.

    Attributes:
        given: takes one row for each rank. Shape: (degree, width).
    """

    given: torch.Tensor

    def sum_into(self, total: torch.Tensor) -> None:
        """Sums the own rows of all ranks, in their order. Collective: the sharding group.

        Args:
            total: takes the sum, in its own type, fp32 at least. Shape: (width,).
        """


class RowSums(Protocol):
    """What makes sums of one model; they are made one after another, on one stream."""

    def rows(self, width: int, dtype: torch.dtype) -> Rows:
        """Returns rows for the next sum. Collective: the sharding group."""


def row_sums(groups: ShardingGroups, device: torch.device, most_elements: int) -> RowSums:
    """Returns what makes the sums of one model.

    Args:
        groups: who exchanges.
        device: where the gradients are.
        most_elements: that travel in one message.
    """
    if groups.make_memory is None:
        return SentRowSums(groups, device, max(most_elements // groups.degree, 1))
    synchronize = functools.partial(torch.cuda.synchronize, device)
    buffers = AlternatingBuffers(groups.make_memory, groups.collectives, synchronize)
    return ReadRowSums(groups, buffers)


class SentRowSums:
    """Sums of rows that the ranks send to each other.

    Args:
        groups: who exchanges.
        device: where the rows are.
        most_columns: that travel in one message.
    """

    def __init__(self, groups: ShardingGroups, device: torch.device, most_columns: int) -> None:
        self._groups = groups
        self._device = device
        self._most_columns = most_columns

    def rows(self, width: int, dtype: torch.dtype) -> _SentRows:
        """See ``RowSums.rows``."""
        given = torch.empty((self._groups.degree, width), dtype=dtype, device=self._device)
        return _SentRows(given, self._groups, self._most_columns)


class _SentRows:
    """See ``Rows``."""

    def __init__(self, given: torch.Tensor, groups: ShardingGroups, most_columns: int) -> None:
        self.given = given
        self._groups = groups
        self._most_columns = most_columns

    def sum_into(self, total: torch.Tensor) -> None:
        """See ``Rows.sum_into``."""
        for given, part in zip(
            torch.split(self.given, self._most_columns, 1),
            torch.split(total, self._most_columns),
            strict=True,
        ):
            _sum_up(part, *self._groups.collectives.exchange_rows(given))


class ReadRowSums:
    """Sums of rows that the ranks read from each other.

    Args:
        groups: who they are.
        buffers: memory that they read.
    """

    def __init__(self, groups: ShardingGroups, buffers: AlternatingBuffers) -> None:
        self._groups = groups
        self._buffers = buffers

    def rows(self, width: int, dtype: torch.dtype) -> _ReadRows:
        """See ``RowSums.rows``."""
        with self._groups.blaming(_DOING):
            memory, start = self._buffers.next(self._groups.degree * width * dtype.itemsize)
        return _ReadRows(self._groups, memory, start, width, dtype)


class _ReadRows:
    """See ``Rows``."""

    def __init__(
        self,
        groups: ShardingGroups,
        memory: SymmetricMemory,
        start: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._groups = groups
        self._memory = memory
        self._row_start = start + groups.index * width * dtype.itemsize
        own = memory.piece(groups.index, start, groups.degree * width, dtype)
        self.given = own.view(groups.degree, width)

    def sum_into(self, total: torch.Tensor) -> None:
        """See ``Rows.sum_into``."""
        degree, index = self._groups.degree, self._groups.index
        rows = {index: self.given[index]}
        with self._groups.blaming(_DOING):
            self._memory.barrier()
            # In an order in which not all read from one at a time.
            for rank in ((index + distance) % degree for distance in range(1, degree)):
                theirs = self._memory.piece(rank, self._row_start, total.numel(), self.given.dtype)
                rows[rank] = torch.empty_like(theirs).copy_(theirs)
        _sum_up(total, *(rows[rank] for rank in range(degree)))


@fused
def _sum_up(total: torch.Tensor, *rows: torch.Tensor) -> None:
    """Makes a total the sum of rows, in its own type."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
