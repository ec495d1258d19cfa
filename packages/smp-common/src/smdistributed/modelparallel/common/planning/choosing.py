"""Choosing the order of a mini-batch: which kind of schedule, and how much it keeps.

What a transfer takes is not known here, so it is taken to last a share of a pass.
"""

from __future__ import annotations

from typing import Literal

from smdistributed.modelparallel.common.planning.schedule import SegmentGraph
from smdistributed.modelparallel.common.planning.simulator import (
    CostModel,
    Pipeline,
    Timeline,
    build_schedule,
    simulate,
)

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
    task_budget: int | None = None,
) -> Timeline:
    """Returns the best order of a kind, with the times that it takes if transfers take some.

    An order that keeps all ranks busy if transfers take no time can make every pass wait for one,
    in a V more than elsewhere; one that was found with transfers in mind may have a larger bubble.
    """
    real = with_transfers(graph)
    found = [
        build_schedule(
            graph,
            num_microbatches,
            kind,
            active_microbatches,
            costs,
            thorough=thorough,
            task_budget=task_budget,
        ).schedule
        for costs in ((CostModel(), real) if kind == "zero_bubble" else (CostModel(),))
    ]
    timelines = [simulate(graph, each, num_microbatches, real) for each in found]
    return min(timelines, key=lambda timeline: timeline.makespan)


def with_transfers(graph: SegmentGraph) -> CostModel:
    """Returns the costs of transfers: a share of a pass."""
    passes = [graph.segments[segment].cost(each) for each, segment in graph.predecessors]
    ranks = {segment.rank for segment in graph.segments}
    # Of a pass of all that a rank has, since a V has twice as many passes of half the length.
    return CostModel(latency=_LATENCY * sum(passes) / max(1, 3 * len(ranks)))
