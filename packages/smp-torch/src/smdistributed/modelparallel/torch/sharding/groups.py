"""The process groups of sharded data parallelism.

A sharding group is a run of consecutive rdp_cp_ranks, ``sharded_data_parallel_degree`` of them.

Source: model-parallel-extended-features-pytorch-sharded-data-parallelism.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.process_group import ProcessGroupCollectives
from smdistributed.modelparallel.torch.collectives.symmetric_memory import MakeMemory
from smdistributed.modelparallel.torch.sharding.agreement import Course
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups, is_hierarchical

Members = tuple[int, ...]


def build_groups(
    topology: Topology,
    degree: int,
    rank: int,
    new_group: Callable[[Members], dist.ProcessGroup],
    blaming: Callable[[Members, str], AbstractContextManager[Any]],
    hosts: Sequence[object] | None,
    readable: Callable[[dist.ProcessGroup, Collectives], MakeMemory | None],
) -> ShardingGroups:
    """Makes all groups, in one order on all ranks, and returns the own ones. Collective: WORLD.

    Args:
        topology: of the job.
        degree: ranks of a sharding group.
        rank: the own global rank.
        new_group: makes one of torch's.
        blaming: gives a context in which errors of torch name ranks, for what is being done.
        hosts: of each rank; None to gather without regard to hosts.
        readable: gives what makes memory that the ranks of a group read from each other, if they
            can; it gets torch's group, and what talks in it.
    """

    def own(kinds: Sequence[Members]) -> tuple[Members, dist.ProcessGroup]:
        made = {members: new_group(members) for members in kinds}
        return next((each, made[each]) for each in kinds if rank in each)

    everyone = range(topology.size)
    shardings = _distinct(topology.sharding_group(each, degree) for each in everyone)
    members, gathering = own(shardings)
    _, reducing = own(shardings)

    def with_copies(kind: CommGroup) -> dist.ProcessGroup | None:
        found = _distinct(
            tuple(
                other
                for other in topology.members(kind, each)
                if _index(topology, other, degree) == _index(topology, each, degree)
            )
            for each in everyone
        )
        return own(found)[1] if len(found[0]) > 1 else None

    within = across = None
    if hosts is not None and all(
        is_hierarchical([hosts[each] for each in group]) for group in shardings
    ):
        withins, acrosses = [], []
        for group in shardings:
            parts: dict[object, list[int]] = {}
            for each in group:
                parts.setdefault(hosts[each], []).append(each)
            withins += [tuple(part) for part in parts.values()]
            acrosses += [tuple(row) for row in zip(*parts.values(), strict=True)]
        within, across = own(withins)[1], own(acrosses)[1]
    collectives = ProcessGroupCollectives(
        reducing, lambda: blaming(members, "sharing parameters and gradients with")
    )
    return ShardingGroups(
        members,
        members.index(rank),
        gathering,
        collectives,
        Course(collectives),
        within,
        across,
        with_copies(CommGroup.DP_CP_GROUP),
        with_copies(CommGroup.RDP_CP_GROUP),
        readable(gathering, collectives),
        lambda doing: blaming(members, doing),
    )


def _index(topology: Topology, rank: int, degree: int) -> int:
    return topology.coordinates(rank).rdp_cp_rank % degree


def _distinct(groups: Any) -> list[Members]:
    return list(dict.fromkeys(groups))
