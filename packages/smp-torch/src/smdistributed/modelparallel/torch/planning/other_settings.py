"""What other settings of the configuration would bring, by what the passes of a step took."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from smdistributed.modelparallel.common.planning.choosing import (
    WORTH,
    Wish,
    kinds_of,
    lean_or_fastest,
)
from smdistributed.modelparallel.common.planning.schedule import SegmentGraph
from smdistributed.modelparallel.torch.planning.segments import Plan


class Setting(NamedTuple):
    """A setting with which a simulation is faster.

    Attributes:
        text: how the configuration says it.
        seconds: what a step takes then.
    """

    text: str
    seconds: float


def faster_settings(
    plan: Plan,
    num_ranks: int,
    num_microbatches: int,
    pipeline: Wish,
    active_microbatches: int,
    seconds: float,
) -> list[Setting]:
    """Returns the settings that gain, the fastest first.

    Args:
        plan: of each microbatch; its passes were timed.
        num_ranks: size of the pipeline.
        num_microbatches: of a step.
        pipeline: the kind of schedule that it has.
        active_microbatches: how many may be in flight.
        seconds: what a step takes as it is.
    """
    own = kinds_of(pipeline)
    found: dict[str, float] = {}
    for kind in kinds_of("auto"):
        graph = plan.segment_graph(num_ranks, halves=kind == "zero_bubble", timed=True)
        if kind in own:
            # Passes of half the size take half as long at best: small kernels do not.
            best = lean_or_fastest(
                _halved(graph), 2 * num_microbatches, kind, active_microbatches, thorough=False
            )
            text = f"microbatches={2 * num_microbatches}, at best"
        else:
            best = lean_or_fastest(
                graph, num_microbatches, kind, active_microbatches, thorough=False
            )
            text = f"pipeline={kind!r}"
        if best.makespan < min(WORTH * seconds, found.get(text, seconds)):
            found[text] = best.makespan
    return sorted(itertools.starmap(Setting, found.items()), key=lambda setting: setting.seconds)


def _halved(graph: SegmentGraph) -> SegmentGraph:
    """Returns the graph of microbatches of half the size."""
    segments = tuple(
        dataclasses.replace(
            each,
            forward_cost=each.forward_cost / 2,
            backward_cost=each.backward_cost / 2,
            weight_cost=None if each.weight_cost is None else each.weight_cost / 2,
        )
        for each in graph.segments
    )
    return dataclasses.replace(graph, segments=segments)
