"""What a pipeline executes, as plain data: segments, the transfers between them, and an order.

A *partition* is the piece of the model that one pipeline rank holds. A *segment* is a maximal run
of a partition between two transfers; a rank holds several of them when a microbatch visits it
several times (an embedding tied to the last layer makes the visits 0 -> 1 -> 0). An *action* is
one pass of one segment for one microbatch, of one of several kinds: forward, backward, or in place
of a backward pass its two halves, the gradients of what the segment reads (for which other ranks
wait) and those of its weights (for which nobody does). A *schedule* is the order of the actions on
every rank. Schedules print and parse (``F0 F1 B0 B1``), so that they can be read,
logged, compared between ranks and tested against a literal staircase.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from smdistributed.modelparallel.common.errors import PartitionError, ScheduleError

_ACTION = re.compile(r"(?P<kind>[FBIW])(?P<microbatch>\d+)(?:@(?P<segment>\d+))?", re.ASCII)


class Kind(enum.StrEnum):
    """What a pass computes; the value is its letter in the text form of a schedule.

    Who plans, simulates or runs a schedule asks a kind what it does, and has a table by kind where
    that does not suffice; so a new kind is a member here and an entry there.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENTS = "I"
    WEIGHT_GRADIENTS = "W"

    @property
    def is_backward(self) -> bool:
        """Whether it comes after the forward pass of its segment."""
        return self is not Kind.FORWARD

    @property
    def completes(self) -> bool:
        """Whether it is the last pass of its segment.

        Then parameters have their gradients, and what the forward pass kept is needed no longer.
        """
        return self in (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS)


@dataclass(frozen=True, order=True)
class Action:
    """One pass of one segment for one microbatch; prints as ``F0@2``: microbatch 0 at segment 2."""

    kind: Kind
    segment: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.segment}"


def parse_actions(text: str, *, segment: int = 0) -> tuple[Action, ...]:
    """Reads actions separated by white space; the inverse of ``Schedule.text``.

    Args:
        text: actions such as ``F0 B0`` or ``F0@2 B0@2``.
        segment: what an action without ``@`` belongs to.

    Raises:
        ScheduleError: a word is not an action.
    """
    actions = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ScheduleError(
                f"An action is F, B, I or W, a microbatch and optionally @ and a segment; received "
                f"{word!r}: write it like F0 or B3@1."
            )
        named = match["segment"]
        actions.append(
            Action(
                Kind(match["kind"]),
                segment if named is None else int(named),
                int(match["microbatch"]),
            )
        )
    return tuple(actions)


@dataclass(frozen=True)
class Segment:
    """A maximal run of a partition between two transfers.

    Attributes:
        index: position in the order of execution; also its place in ``SegmentGraph.segments``.
        rank: pipeline rank that executes it.
        forward_cost: duration of one forward pass, in seconds or any one unit for the whole graph.
        backward_cost: the same for the backward pass; with ``weight_cost``, for the part of it that
            gives the gradients of what the segment reads.
        has_backward: whether it takes part in the backward pass.
        activation_bytes: what a microbatch keeps alive from the forward to the backward pass.
        weight_cost: the same for the gradients of its weights, where these are a pass of their own;
            None where one backward pass gives all gradients.
    """

    index: int
    rank: int
    forward_cost: float
    backward_cost: float
    has_backward: bool
    activation_bytes: int = 0
    weight_cost: float | None = None

    @property
    def gradient_kind(self) -> Kind:
        """The kind of pass that gives other segments their gradients."""
        return Kind.BACKWARD if self.weight_cost is None else Kind.INPUT_GRADIENTS

    @property
    def last_kind(self) -> Kind:
        """The kind of its last pass."""
        return Kind.BACKWARD if self.weight_cost is None else Kind.WEIGHT_GRADIENTS

    def cost(self, kind: Kind) -> float:
        """Returns the duration of a pass."""
        if kind is Kind.WEIGHT_GRADIENTS:
            return self.weight_cost or 0.0
        return self.forward_cost if kind is Kind.FORWARD else self.backward_cost


@dataclass(frozen=True)
class Edge:
    """A value that one segment makes and a later one reads.

    Attributes:
        source: index of the segment that makes the value.
        target: index of the segment that reads it; on the same rank, nothing is sent.
        num_bytes: size for one microbatch; its gradient has the same size.
        has_grad: whether a gradient flows back.
    """

    source: int
    target: int
    num_bytes: int
    has_grad: bool


@dataclass(frozen=True)
class SegmentGraph:
    """The segments of one microbatch and what flows between them.

    Several edges may join the same two segments (hidden states with a gradient, a mask without),
    and an edge may skip any number of segments.

    Attributes:
        segments: by index.
        edges: what flows.
        num_ranks: pipeline ranks, with or without segments.
        backward_waits: pairs of segments: the backward pass of the first waits for the forward pass
            of the second as well. A loss of several outputs makes such pairs.

    Raises:
        PartitionError: an index, a rank or a cost is out of range, or an edge leads backward.
    """

    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]
    num_ranks: int
    backward_waits: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for position, segment in enumerate(self.segments):
            if segment.index != position:
                raise PartitionError(
                    f"Segments are listed by index; received index {segment.index} at position "
                    f"{position}: number them from 0 in the order of execution."
                )
            if not 0 <= segment.rank < self.num_ranks:
                raise PartitionError(
                    f"Segment {position} is on rank {segment.rank}, but there are "
                    f"{self.num_ranks} ranks: use a rank from 0 to {self.num_ranks - 1}."
                )
            costs = (segment.forward_cost, segment.backward_cost, segment.weight_cost or 0.0)
            if min(*costs, segment.activation_bytes) < 0:
                raise PartitionError(
                    f"Costs and sizes are not negative; received {segment}: measure it again."
                )
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.segments):
                raise PartitionError(
                    f"An edge leads from a segment to a later one of the {len(self.segments)}; "
                    f"received {edge.source} -> {edge.target}: number segments in the order of "
                    f"execution."
                )
            if edge.num_bytes < 0:
                raise PartitionError(f"Sizes are not negative; received {edge}: measure it again.")
        for pair in self.backward_waits:
            if not all(0 <= index < len(self.segments) for index in pair):
                raise PartitionError(
                    f"backward_waits are pairs of the {len(self.segments)} segments; received "
                    f"{pair}: use indices from 0 to {len(self.segments) - 1}."
                )

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """For every segment, its share in what its rank keeps of a microbatch for backward passes.

        By ``activation_bytes``, or where these are not known by the costs of forward passes.
        """
        known = any(segment.activation_bytes for segment in self.segments)
        sizes = [
            float(segment.has_backward)
            * (segment.activation_bytes if known else segment.forward_cost)
            for segment in self.segments
        ]
        of_ranks = [0.0] * self.num_ranks
        for segment, size in zip(self.segments, sizes, strict=True):
            of_ranks[segment.rank] += size
        return tuple(
            size / of_ranks[segment.rank] if size else 0.0
            for segment, size in zip(self.segments, sizes, strict=True)
        )

    @cached_property
    def predecessors(self) -> Mapping[tuple[Kind, int], tuple[tuple[Kind, int], ...]]:
        """What each pass (kind, segment) waits for within one microbatch, in order of execution.

        A forward pass waits for that of every segment it reads from. A backward pass waits for its
        own forward pass, for those that ``backward_waits`` names, and for the backward pass of
        every segment that returns it a gradient. Where it is two passes, it is the first that
        waits so and is waited for, and the second waits for the first.
        """
        forward: list[set[int]] = [set() for _ in self.segments]
        backward: list[set[int]] = [set() for _ in self.segments]
        late: list[set[int]] = [{index} for index in range(len(self.segments))]
        for index, other in self.backward_waits:
            late[index].add(other)
        for edge in self.edges:
            forward[edge.target].add(edge.source)
            if edge.has_grad and self.segments[edge.target].has_backward:
                backward[edge.source].add(edge.target)
        waits: dict[tuple[Kind, int], tuple[tuple[Kind, int], ...]] = {}
        for index, sources in enumerate(forward):
            waits[Kind.FORWARD, index] = tuple((Kind.FORWARD, s) for s in sorted(sources))
        for segment in reversed(self.segments):
            if segment.has_backward:
                kind, index = segment.gradient_kind, segment.index
                waits[kind, index] = (
                    *((Kind.FORWARD, other) for other in sorted(late[index])),
                    *((self.segments[t].gradient_kind, t) for t in sorted(backward[index])),
                )
                if segment.weight_cost is not None:
                    waits[Kind.WEIGHT_GRADIENTS, index] = ((kind, index),)
        return waits

    def dependencies(self, num_microbatches: int) -> Mapping[Action, tuple[Action, ...]]:
        """Every action of a mini-batch and the actions that it waits for."""
        return {
            Action(kind, segment, microbatch): tuple(Action(k, s, microbatch) for k, s in waits)
            for microbatch in range(num_microbatches)
            for (kind, segment), waits in self.predecessors.items()
        }


@dataclass(frozen=True)
class Schedule:
    """The order of the actions on every pipeline rank."""

    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Schedule:
        """Reads one text a rank; an action without ``@`` is of the segment with the rank's number.

        Raises:
            ScheduleError: a word is not an action.
        """
        return cls(tuple(parse_actions(text, segment=rank) for rank, text in enumerate(texts)))

    def text(self, rank: int) -> str:
        """The actions of a rank; the segment is left out where each rank has its own number's."""
        if self._segments_are_ranks:
            return " ".join(f"{action.kind}{action.microbatch}" for action in self.ranks[rank])
        return " ".join(map(str, self.ranks[rank]))

    def digest(self) -> str:
        """A SHA-256 of the whole schedule, the same in every process: compare it between ranks."""
        lines = (" ".join(map(str, actions)) for actions in self.ranks)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def _segments_are_ranks(self) -> bool:
        return all(
            action.segment == rank for rank, actions in enumerate(self.ranks) for action in actions
        )
