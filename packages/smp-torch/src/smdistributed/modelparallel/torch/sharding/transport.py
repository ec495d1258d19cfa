"""The groups of torch that sharded data parallelism exchanges in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from smdistributed.modelparallel.torch.collectives.process_group import ProcessGroupCollectives
from smdistributed.modelparallel.torch.collectives.symmetric_memory import MakeMemory
from smdistributed.modelparallel.torch.sharding.agreement import Course


@dataclass(frozen=True)
class ShardingGroups:
    """Torch's groups of sharded data parallelism that this rank is in.

    Attributes:
        members: global ranks of the sharding group, by their number in it.
        index: the number of this rank.
        gathering: of the sharding group, for nothing but gathering; on GPUs it has a stream of its
            own, so that gathering ahead overlaps with what is computed.
        collectives: of the sharding group, for agreements and reductions.
        course: of the sharding group.
        within_host: those of the sharding group on this host; None where one host has all, or
            where ``sdp_hierarchical_allgather`` is off.
        across_hosts: those of the sharding group with the same number on each host.
        copies: those that have the same block of a parameter; None if nobody else has.
        copies_of_slices: those that have the same block of a slice.
        make_memory: makes memory that the ranks of the sharding group read and write; None where
            they cannot.
        blaming: a context in which errors of torch name who is missing.
    """

    members: tuple[int, ...]
    index: int
    gathering: dist.ProcessGroup
    collectives: ProcessGroupCollectives
    course: Course
    within_host: dist.ProcessGroup | None
    across_hosts: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    copies_of_slices: dist.ProcessGroup | None
    make_memory: MakeMemory | None
    blaming: Callable[[str], AbstractContextManager[Any]]

    @property
    def degree(self) -> int:
        """How many ranks share a parameter."""
        return len(self.members)

    def everyones(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, as many from each. Collective: the sharding group."""
        return self.collectives.compare(numbers)

    def everyones_texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks. Collective: the sharding group."""
        return self.collectives.compare_texts(text)


def is_hierarchical(hosts: Sequence[object]) -> bool:
    """Tells whether ranks lie on several hosts, as many on each, one host after the other.

    Args:
        hosts: of each rank of a sharding group.
    """
    found = list(dict.fromkeys(hosts))
    size = len(hosts) // len(found)
    ordered = [host for host in found for _ in range(size)]
    return 1 < len(found) < len(hosts) and list(hosts) == ordered
