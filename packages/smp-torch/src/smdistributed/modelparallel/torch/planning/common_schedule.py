"""One schedule for microbatches that take different ways through the model.

Microbatches differ when the last is smaller, when code decided by their data, or when a layer was
dropped at random. Their plans are laid over each other: a sequence of segments that holds that of
every plan is scheduled, and each microbatch then skips what its own plan does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smdistributed.modelparallel.common.planning.choosing import (
    WORTH,
    Wish,
    kinds_of,
    lean_or_fastest,
    with_transfers,
)
from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Kind,
    Schedule,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import Timeline, simulate
from smdistributed.modelparallel.torch.planning.segments import Plan


class Ordered(NamedTuple):
    """The actions of a mini-batch, in order.

    Attributes:
        schedule: their order; the segments of an action are those of the microbatch's own plan.
        makespan: how long a simulation took for them, in the unit of the costs.
        in_seconds: whether that is seconds.
        bubble_fraction: the share of all ranks' time in which they wait.
    """

    schedule: Schedule
    makespan: float
    in_seconds: bool
    bubble_fraction: float


def common_schedule(
    plans: Sequence[Plan],
    num_ranks: int,
    pipeline: Wish,
    active_microbatches: int,
) -> Ordered:
    """Orders the actions of a mini-batch.

    Args:
        plans: the plan of each microbatch.
        num_ranks: size of the pipeline.
        pipeline: which kind of schedule; "auto": zero_bubble where it is faster. What is
            V-shaped is the partition, so "zero_bubble_v" is "zero_bubble" here.
        active_microbatches: how many may be in flight.
    """
    different = list(dict.fromkeys(plans))
    timelines = []
    for kind in kinds_of(pipeline):
        halves = kind == "zero_bubble"
        merged, places = _merged(different, num_ranks, halves=halves)
        # Mini-batches of many kinds, as where layers are dropped, are planned while they train.
        thorough = len(different) == 1
        found = lean_or_fastest(merged, len(plans), kind, active_microbatches, thorough=thorough)
        timelines.append(found)
    best = min(timelines, key=lambda timeline: timeline.makespan)
    # The costs are counted, not measured, and the halves take a little more than the whole.
    chosen = best if best.makespan < WORTH * timelines[0].makespan else timelines[0]
    segment_at = {
        plan: {position: segment for segment, position in enumerate(place)}
        for plan, place in zip(different, places, strict=True)
    }

    def own(action: Action) -> Action | None:
        plan = plans[action.microbatch]
        segment = segment_at[plan].get(action.segment)
        if segment is None or (action.kind.is_backward and segment not in plan.backward):
            return None
        return Action(action.kind, segment, action.microbatch)

    schedule = Schedule(
        tuple(
            tuple(found for found in map(own, actions) if found is not None)
            for actions in chosen.schedule.ranks
        )
    )
    in_seconds = _are_timed(plans) or all(plan.in_seconds for plan in plans)
    return Ordered(schedule, chosen.makespan, in_seconds, chosen.bubble_fraction)


def timeline_of(plans: Sequence[Plan], num_ranks: int, schedule: Schedule) -> Timeline:
    """Returns the simulation of an order, by what passes of the plans took.

    Args:
        plans: the plan of each microbatch, the same one: the passes of others differ.
        num_ranks: size of the pipeline.
        schedule: the order.
    """
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    halves = Kind.WEIGHT_GRADIENTS in kinds
    graph = plans[0].segment_graph(num_ranks, halves=halves, timed=True)
    return simulate(graph, schedule, len(plans), with_transfers(graph))


def _are_timed(plans: Sequence[Plan]) -> bool:
    return all(plan.is_timed for plan in plans)


def _merged(
    plans: Sequence[Plan], num_ranks: int, *, halves: bool
) -> tuple[SegmentGraph, list[list[int]]]:
    timed = _are_timed(plans)
    return _lay_over([plan.segment_graph(num_ranks, halves=halves, timed=timed) for plan in plans])


def one_by_one(plans: Sequence[Plan], num_ranks: int) -> Schedule:
    """Orders the actions of a mini-batch as one process does: no two microbatches overlap.

    Args:
        plans: the plan of each microbatch.
        num_ranks: size of the pipeline.
    """
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    for microbatch, plan in enumerate(plans):
        for segment in plan.segments:
            ranks[segment.rank].append(Action(Kind.FORWARD, segment.index, microbatch))
        for segment in reversed(plan.segments):
            if segment.index in plan.backward:
                ranks[segment.rank].append(Action(Kind.BACKWARD, segment.index, microbatch))
    return Schedule(tuple(map(tuple, ranks)))


def _lay_over(graphs: Sequence[SegmentGraph]) -> tuple[SegmentGraph, list[list[int]]]:
    """Returns a graph that holds all graphs, and for each the positions of its segments in it."""
    if len(graphs) == 1:
        return graphs[0], [list(range(len(graphs[0].segments)))]
    ranks: list[int] = []
    for graph in graphs:
        ranks = _supersequence(ranks, [segment.rank for segment in graph.segments])
    places = [_positions([segment.rank for segment in graph.segments], ranks) for graph in graphs]
    segments = [Segment(index, rank, 0.0, 0.0, False) for index, rank in enumerate(ranks)]
    edges: dict[tuple[int, int], Edge] = {}
    for graph, place in zip(graphs, places, strict=True):
        for segment in graph.segments:
            known = segments[place[segment.index]]
            segments[known.index] = Segment(
                known.index,
                known.rank,
                max(known.forward_cost, segment.forward_cost),
                max(known.backward_cost, segment.backward_cost),
                known.has_backward or segment.has_backward,
                max(known.activation_bytes, segment.activation_bytes),
                _largest(known.weight_cost, segment.weight_cost),
            )
        for edge in graph.edges:
            ends = place[edge.source], place[edge.target]
            former = edges.get(ends)
            edges[ends] = Edge(
                *ends,
                max(edge.num_bytes, former.num_bytes if former else 0),
                edge.has_grad or (former is not None and former.has_grad),
            )
    merged = SegmentGraph(tuple(segments), tuple(edges.values()), graphs[0].num_ranks)
    return merged, places


def _largest(*costs: float | None) -> float | None:
    return max((cost for cost in costs if cost is not None), default=None)


def _supersequence(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns a shortest sequence that holds both, in their orders."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i in range(len(one) - 1, -1, -1):
        for j in range(len(other) - 1, -1, -1):
            lengths[i][j] = (
                lengths[i + 1][j + 1] + 1
                if one[i] == other[j]
                else max(lengths[i + 1][j], lengths[i][j + 1])
            )
    i = j = 0
    found = []
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            found.append(one[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            found.append(one[i])
            i += 1
        else:
            found.append(other[j])
            j += 1
    return [*found, *one[i:], *other[j:]]


def _positions(own: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Returns where a sequence lies in one that holds it; the first places that fit."""
    positions = iter(range(len(ranks)))
    return [next(position for position in positions if ranks[position] == rank) for rank in own]
