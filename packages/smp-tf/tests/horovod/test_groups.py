"""Horovod's wheel, tried as the library uses it: one Horovod for each group of a job's ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from smdistributed.modelparallel.common.testing import run_ranks

if importlib.util.find_spec("horovod") is None:
    pytest.skip("needs Horovod: tools/build_horovod.py makes it", allow_module_level=True)

pytestmark = pytest.mark.multiproc

Groups = tuple[tuple[int, ...], ...]
RANKS = 4
#: Neighbours, every other rank, unequal and out of order, all.
GROUPINGS: tuple[Groups, ...] = (
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 3, 1), (2,)),
    ((0, 1, 2, 3),),
)


def reduce_in_each_grouping() -> list[dict[str, float]]:
    """Returns what Horovod found on this rank; rank r has 10**r, so that a digit tells of it."""
    from mpi4py import MPI  # which initialises MPI, before Horovod does

    assert MPI.Is_initialized()
    return [reduce_in_group(groups, MPI.COMM_WORLD) for groups in GROUPINGS]


def reduce_in_group(groups: Groups, world: Any) -> dict[str, float]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    rank = world.Get_rank()
    (group,) = (group for group in groups if rank in group)
    hvd.init(comm=list(group))
    own = tf.constant(10.0**rank)
    in_graph = tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum, name="in_graph"))
    found = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "sum": float(hvd.allreduce(own, op=hvd.Sum)),
        "sum in a graph": float(in_graph(own)),
        "of the first": float(hvd.broadcast(own, root_rank=0)),
    }
    hvd.shutdown()
    # MPI is not Horovod's: it goes on without it.
    return {**found, "sum of all": world.allreduce(10.0**rank)}


def wanted(groups: Groups, rank: int) -> dict[str, float]:
    (group,) = (group for group in groups if rank in group)
    total = sum(10.0**other for other in group)
    return {
        "rank": group.index(rank),
        "size": len(group),
        "sum": total,
        "sum in a graph": total,
        "of the first": 10.0 ** group[0],
        "sum of all": 1111.0,
    }


def test_each_group_reduces_over_its_own_ranks_only() -> None:
    results = run_ranks(RANKS, reduce_in_each_grouping, launcher="mpirun", timeout=200).results
    for rank, found in enumerate(results):
        assert found == [wanted(groups, rank) for groups in GROUPINGS]
