"""What the passes of a step hold on each rank, known from its plans before any of them runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smdistributed.modelparallel.common.planning.pass_memory import (
    PassMemory,
    in_flight,
    most_held,
)
from smdistributed.modelparallel.common.planning.pass_tape import PassTape, Span
from smdistributed.modelparallel.common.planning.schedule import Action, Schedule
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind


@dataclass(frozen=True)
class PassesHeld:
    """Bytes that the passes of a mini-batch hold on a rank at their fullest.

    Attributes:
        activations: that wait for their backward passes, and what a pass makes on its way.
        a_microbatch: of them, what a microbatch keeps.
        in_flight: the most microbatches that are begun and not over.
        transfers: what comes from other ranks of the pipeline and goes to them, what the step
            is given, and what it returns.
    """

    activations: float
    a_microbatch: float
    in_flight: int
    transfers: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return self.activations + self.transfers


@dataclass
class PassesAhead:
    """What is known of the passes of this process's steps.

    Attributes:
        ranks: what those of a mini-batch with gradients hold, on each rank of a pipeline, of the
            step function that was recorded last; empty while that is not known.
        listeners: called when it is.
    """

    ranks: tuple[PassesHeld, ...] = ()
    listeners: list[Callable[[], None]] = field(default_factory=list)
    _known: weakref.WeakSet[Callable[..., Any]] = field(default_factory=weakref.WeakSet)

    def note(self, function: Callable[..., Any], ranks: Sequence[PassesHeld]) -> None:
        """Takes note of what the passes of a step function hold."""
        self._known.add(function)
        self.ranks = tuple(ranks)
        for each in self.listeners:
            each()

    def knows(self, function: Callable[..., Any]) -> bool:
        """Whether that of a step function has been noted."""
        return function in self._known


def passes_held(
    plans: Sequence[Plan], schedule: Schedule, num_ranks: int
) -> tuple[PassesHeld, ...] | None:
    """Returns what the passes of a mini-batch hold on each rank; None if that was not noted.

    Args:
        plans: the plan of each microbatch.
        schedule: the order of their passes.
        num_ranks: size of the pipeline.
    """
    found: dict[Plan, dict[int, PassMemory]] = {}
    for plan in dict.fromkeys(plans):
        tape = plan.graph.tape
        if tape is None:
            return None
        found[plan] = {each.index: segment_memory(each, tape) for each in plan.segments}

    def of(action: Action) -> PassMemory:
        return found[plans[action.microbatch]][action.segment]

    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        kept = max(
            sum(found[plan][each.index].kept for each in plan.segments if each.rank == rank)
            for plan in found
        )
        begun = in_flight(actions)
        moved = _moved(plans, rank, begun)
        ranks.append(PassesHeld(most_held(actions, of), kept, begun, moved))
    return tuple(ranks)


def segment_memory(segment: SegmentNodes, tape: PassTape) -> PassMemory:
    """Returns what the passes of a segment hold; what is checkpointed, it computes again.

    Args:
        segment: of a plan.
        tape: of its microbatch.
    """
    nodes = [node for node in segment.nodes if node.segment == segment.index]
    whole = PassMemory()
    for region, run in itertools.groupby(nodes, key=lambda node: node.region):
        part = list(run)
        memory = tape.memory(_spans(part))
        if region is not None:
            memory = _again(part, memory)
        whole = whole.then(memory) if region is not None or _has_regions(nodes) else memory
    return whole


def _has_regions(nodes: Iterable[Node]) -> bool:
    return any(node.region is not None for node in nodes)


def _again(nodes: Sequence[Node], memory: PassMemory) -> PassMemory:
    """Returns the memory of a checkpointed call: what it is given is kept, and all else again."""
    made = {value for node in nodes for value in node.outputs}
    given = dict.fromkeys(
        value
        for node in nodes
        for value in node.inputs
        if value not in made and value.node.kind is not NodeKind.ATTRIBUTE
    )
    return memory.again(float(sum(value.num_bytes for value in given)))


def _spans(nodes: Iterable[Node]) -> list[Span]:
    return [span for node in nodes for span in node.work.spans]


def _moved(plans: Sequence[Plan], rank: int, in_flight: int) -> float:
    """Returns the bytes of what comes to a rank and goes, of what it is given and what returns.

    What a rank has sent is there until it is answered, and the next message is waited for.
    """
    largest = 0
    staying = 0
    for plan in plans:
        for value, readers in plan.readers.items():
            ranks = {plan.segments[each].rank for each in readers} - {plan.owner(value)}
            if ranks and (rank in ranks or plan.owner(value) == rank):
                largest = max(largest, value.num_bytes)
        inputs = plan.inputs_of_rank(rank)
        staying += sum(
            node.outputs[0].num_bytes
            for node in plan.graph.nodes
            if node.kind is NodeKind.INPUT and node.target in inputs
        )
        staying += sum(value.num_bytes for value in plan.graph.returned)
    return float((in_flight + 1) * largest + staying)
