"""One schedule for microbatches that take different ways through the model.

Microbatches differ when the last is smaller, when code decided by their data, or when a layer was
dropped at random. Their plans are laid over each other: a sequence of segments that holds that of
every plan is scheduled, and each microbatch then skips what its own plan does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Kind,
    Schedule,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import (
    CostModel,
    Pipeline,
    Timeline,
    build_schedule,
    simulate,
)
from smdistributed.modelparallel.torch.plan.segments import Plan

#: What the user may ask for.
Wish = Pipeline | Literal["zero_bubble_v", "auto"]

#: What a second kind of schedule must take of the time of the first to be chosen.
WORTH = 0.99
#: What of its time a schedule may take longer that keeps less by as many microbatches as there are
#: ranks; by fewer, in proportion.
_WORTH_OF_MEMORY = 0.05
#: How many smaller bounds of what is kept are tried.
_BOUNDS = 4
#: What a transfer is taken to last, of a mean pass.
_LATENCY = 0.02


class Ordered(NamedTuple):
    """The actions of a mini-batch, in order.

    Attributes:
        schedule: their order; the segments of an action are those of the microbatch's own plan.
        makespan: how long a simulation took for them, in the unit of the costs.
        in_seconds: whether that is seconds.
    """

    schedule: Schedule
    makespan: float
    in_seconds: bool


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
    return Ordered(schedule, chosen.makespan, in_seconds)


def seconds_of(plans: Sequence[Plan], num_ranks: int, schedule: Schedule) -> float:
    """Returns how long a simulation takes for an order, by what passes of the plans took.

    Args:
        plans: the plan of each microbatch, the same one: the passes of others differ.
        num_ranks: size of the pipeline.
        schedule: the order.
    """
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    halves = Kind.WEIGHT_GRADIENTS in kinds
    graph = plans[0].segment_graph(num_ranks, halves=halves, timed=True)
    return simulate(graph, schedule, len(plans), _with_transfers(graph)).makespan


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


def kinds_of(pipeline: Wish) -> list[Pipeline]:
    """Returns the kinds of schedules that are simulated, the one that must be beaten first."""
    if pipeline == "auto":
        return ["interleaved", "zero_bubble"]
    return ["zero_bubble" if pipeline == "zero_bubble_v" else pipeline]


def lean_or_fastest(
    graph: SegmentGraph,
    num_microbatches: int,
    kind: Pipeline,
    active_microbatches: int,
    *,
    thorough: bool = True,
) -> Timeline:
    """Returns the best order of a kind, or one that keeps less and is hardly slower.

    Where gradients of weights wait, two more microbatches in flight than there are ranks gain much
    on four ranks, and next to nothing on two, where they are a third of what a rank keeps.
    """
    active_microbatches = min(active_microbatches, num_microbatches)  # more cannot be in flight
    if kind != "zero_bubble" or active_microbatches <= graph.num_ranks:
        return fastest(graph, num_microbatches, kind, active_microbatches, thorough=thorough)
    step = max(1, (active_microbatches - graph.num_ranks) // _BOUNDS)
    bounds = [active_microbatches, *range(graph.num_ranks, active_microbatches, step)]
    found = [fastest(graph, num_microbatches, kind, bound, thorough=thorough) for bound in bounds]

    def price(each: Timeline) -> float:
        return each.makespan * (1 + _WORTH_OF_MEMORY * max(each.peak_kept) / graph.num_ranks)

    return min(found, key=price)


def fastest(
    graph: SegmentGraph,
    num_microbatches: int,
    kind: Pipeline,
    active_microbatches: int,
    *,
    thorough: bool = True,
) -> Timeline:
    """Returns the best order of a kind, with the times that it takes if transfers take some.

    An order that keeps all ranks busy if transfers take no time can make every pass wait for one,
    in a V more than elsewhere; one that was found with transfers in mind may have a larger bubble.
    """
    real = _with_transfers(graph)
    found = [
        build_schedule(
            graph, num_microbatches, kind, active_microbatches, costs, thorough=thorough
        ).schedule
        for costs in ((CostModel(), real) if kind == "zero_bubble" else (CostModel(),))
    ]
    timelines = [simulate(graph, each, num_microbatches, real) for each in found]
    return min(timelines, key=lambda timeline: timeline.makespan)


def _with_transfers(graph: SegmentGraph) -> CostModel:
    """Returns the costs of transfers: a share of a pass."""
    passes = [graph.segments[segment].cost(each) for each, segment in graph.predecessors]
    ranks = {segment.rank for segment in graph.segments}
    # Of a pass of all that a rank has, since a V has twice as many passes of half the length.
    return CostModel(latency=_LATENCY * sum(passes) / max(1, 3 * len(ranks)))


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
