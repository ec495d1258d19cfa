"""Which shape of partition is faster: one piece of the model a rank, or the two of a V.

The partition is decided before there are plans, so what is simulated here is a chain of the pieces
with the computation that was counted in them.
"""

from __future__ import annotations

import itertools

from smdistributed.modelparallel.common.planning.choosing import WORTH, fastest, kinds_of
from smdistributed.modelparallel.common.planning.partitioner import Assignment
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.schedule import Edge, Segment, SegmentGraph


def v_gains(
    flat: Assignment,
    v_shaped: Assignment,
    num_microbatches: int,
    active_microbatches: int,
    whole: PassCosts,
) -> bool:
    """Tells whether a V is faster by more than counted costs are worth.

    Args:
        flat: the partition with one piece a rank; it runs by the best of its schedules.
        v_shaped: the other one.
        num_microbatches: of a mini-batch.
        active_microbatches: how many may be in flight.
        whole: what the passes of the whole model cost.
    """
    bounds = num_microbatches, active_microbatches
    times = []
    for kind in kinds_of("auto"):
        graph = _chain(flat, whole, halves=kind == "zero_bubble")
        times.append(fastest(graph, bounds[0], kind, bounds[1]).makespan)
    graph = _chain(v_shaped, whole, halves=True)
    return fastest(graph, bounds[0], "zero_bubble", bounds[1]).makespan < WORTH * min(times)


def _chain(assignment: Assignment, whole: PassCosts, *, halves: bool) -> SegmentGraph:
    """Returns the runs of units that compute on one partition, one after the other."""
    computing = [unit for unit in assignment.placed if unit.compute]
    runs = itertools.groupby(computing, key=lambda unit: unit.partition)
    segments = []
    for index, (rank, units) in enumerate(runs):
        share = sum(unit.compute for unit in units) / (whole.both or 1.0)
        later = share * whole.weights if halves else 0.0
        segments.append(
            Segment(
                index,
                rank,
                forward_cost=share * whole.forward,
                backward_cost=share * whole.backward - later,
                has_backward=True,
                weight_cost=later or None,
            )
        )
    edges = tuple(Edge(i, i + 1, num_bytes=0, has_grad=True) for i in range(len(segments) - 1))
    return SegmentGraph(tuple(segments), edges, assignment.num_partitions)
