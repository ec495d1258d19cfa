"""Buffers of split modules that a step changes: which microbatches may overlap.

A microbatch reads such a buffer on one rank, and keeps what it makes of it there; see
``record.trace.buffers``. If it does both in one segment, the next microbatch comes behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.ranks import changed_buffer
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import Graph, NodeKind, changed_attributes
from smdistributed.modelparallel.torch.record.trace.replicated import sources


def buffers_in_turn(plans: Sequence[Plan]) -> list[str]:
    """Says which buffers of split modules have microbatches run one after the other.

    Args:
        plans: the plan of each microbatch.

    Raises:
        UnsupportedError: microbatches read, or change, one on different ranks.
    """
    distinct = list(dict.fromkeys(plans))
    reasons = []
    for slot in _changed(distinct):
        places = [_places(plan, slot) for plan in distinct]
        if len(_ranks(places)) > 1:
            raise UnsupportedError(
                f"{title_of(slot)}, a buffer of a module that is split over partitions, is changed "
                "by some microbatches of a step and read by others that do not change it, on other "
                "partitions. Let all of them change it, or put the module on one partition."
            )
        if len(distinct) > 1 or any(len(each) > 1 for each in places):
            reasons.append(
                f"{title_of(slot)} is read in one place of the pipeline and changed in another"
            )
    return reasons


def buffers_apart(plans: Collection[Plan]) -> dict[Slot, int]:
    """Returns the buffers that microbatches read, or change, on different ranks, and one of these.

    Args:
        plans: of the microbatches of a step.
    """
    found = {}
    for slot in _changed(plans):
        places = [_places(plan, slot) for plan in plans]
        if len(_ranks(places)) > 1:
            changing = (at for plan, at in zip(plans, places, strict=True) if _has(plan, slot))
            found[slot] = min(_ranks(changing))
    return found


def title_of(slot: Slot) -> str:
    """Returns what a message calls a buffer."""
    return f"{type(slot[0]).__name__}.{slot[1]}"


def check_shared(graph: Graph, is_shared: Callable[[Slot], bool]) -> None:
    """Refuses changes of a buffer of which modules of several partitions have copies.

    Args:
        graph: of a microbatch.
        is_shared: whether that is so of a buffer, and one of them stays whole.

    Raises:
        UnsupportedError: a call changes one.
    """
    for node in graph.nodes:
        kept = [(module, name) for module, names in node.stateful.items() for name in names]
        written = [value.node.target for value in changed_attributes(node)]
        for slot in (*kept, *written):
            if is_shared(slot):
                raise UnsupportedError(
                    f"{node.name} changes {title_of(slot)}, a buffer that modules of several "
                    "partitions share, each of which has a copy. Give each module a buffer of its "
                    "own, or put the modules on one partition."
                )


def _changed(plans: Iterable[Plan]) -> list[Slot]:
    return list(dict.fromkeys(slot for plan in plans for slot in plan.graph.buffers))


def _has(plan: Plan, slot: Slot) -> bool:
    return slot in plan.graph.buffers


def _ranks(places: Iterable[set[tuple[int, int]]]) -> set[int]:
    return {rank for each in places for rank, _ in each}


def _places(plan: Plan, slot: Slot) -> set[tuple[int, int]]:
    """Returns where a plan reads a buffer, and keeps it: ranks and segments."""
    found = set()
    for segment in plan.segments:
        for node in segment.nodes:
            is_read = node.kind is NodeKind.ATTRIBUTE and node.target == slot
            if is_read or changed_buffer(plan.graph, node) == slot:
                found.add((segment.rank, segment.index))
    if slot not in plan.graph.buffers:
        # What all ranks compute of it when the step is over would be of its last content.
        shared = sources([value for value in plan.graph.returned if value.replicated])
        if any(node.kind is NodeKind.ATTRIBUTE and node.target == slot for node in shared):
            found.add((-1, -1))
    return found
