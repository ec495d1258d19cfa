"""The order in which this process executes the passes of a step, as control edges in its graph.

Transfers are put in an order only where they need one: that of the ends of the passes which make
what is sent, in the plan of the whole pipeline. It is the same on both sides of each transfer, and
nobody waits in a circle, since a pass ends in the plan after everything that it waits for.

What waits for what inside a call is known from its plan. Between calls of the model in one body
it is read off the graph: which calls an input or a gradient comes from.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Kind,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import (
    CostModel,
    Timeline,
    build_schedule,
)
from smdistributed.modelparallel.tensorflow.compat import functions, graphs
from smdistributed.modelparallel.tensorflow.execute.entries import (
    Entries,
    Entry,
    Origins,
    check_alike,
)
from smdistributed.modelparallel.tensorflow.execute.links import Links
from smdistributed.modelparallel.tensorflow.execute.replay import Call, Request
from smdistributed.modelparallel.tensorflow.planning.segments import Pass


def impose_order(
    microbatches: Sequence[Sequence[Call]],
    partition: int,
    num_partitions: int,
    pipeline: Any,
    active_microbatches: int,
    links: Links,
    is_serial: bool,
) -> Timeline | None:
    """Orders the passes of this process; returns the plan of the whole pipeline.

    Args:
        microbatches: the calls of each microbatch, in the order of the body.
        partition: of this process.
        num_partitions: of the model.
        pipeline: name of the schedule.
        active_microbatches: bound of the microbatches in flight.
        links: of this process.
        is_serial: the body itself writes what the calls read, so that each microbatch must find
            what the one before it left.
    """
    check_alike(microbatches)
    calls = microbatches[0]
    entries = Entries(calls)
    in_a_row = is_serial or _share_state(calls) or keep_tapes(calls)
    graph = _joined(calls, entries, num_partitions, in_a_row)
    if in_a_row:
        pipeline, active_microbatches = "interleaved", 1
    timeline = build_schedule(
        graph, len(microbatches), pipeline, active_microbatches, CostModel.unmeasured(graph)
    )
    here = tf.compat.v1.get_default_graph()
    entry_of = {segment: entry for entry in entries.all for segment in entry.segments()}
    order = []
    for action in timeline.schedule.ranks[partition]:
        entry, own = entry_of[action.segment], microbatches[action.microbatch]
        operation = entry.operation(own, action.kind, action.segment)
        # What is in a loop or a branch of the body waits for its data alone.
        if operation is not None and operation.graph is here:
            order.append(operation)
    for earlier, later in pairwise(order):
        graphs.add_control_input(later, earlier)
    links.in_order(_ordered_transfers(microbatches, entries, timeline))
    return timeline


def _share_state(calls: Sequence[Call]) -> bool:
    """Tells whether several passes of a microbatch use a resource that one of them changes.

    In a pipeline a microbatch would find in it what a later one left.
    """
    uses: dict[int, set[Any]] = defaultdict(set)
    changed: set[int] = set()
    for number, call in enumerate(calls):
        plan = call.local.plan
        for one, used in plan.resources.items():
            for name, is_changed in used.items():
                key = id(plan.trace.captured[name])
                uses[key].add((number, one))
                if is_changed:
                    changed.add(key)
    return any(len(uses[key]) > 1 for key in changed)


def keep_tapes(calls: Iterable[Call]) -> bool:
    """Tells whether gradients of a ``tf.py_function`` are computed in a microbatch.

    TensorFlow keeps the tape of the newest forward pass alone, by the operation, so that the
    backward pass of a microbatch must follow its forward pass, with one partition too.
    """
    return any(map(_keeps_tapes, calls))


def _keeps_tapes(call: Call) -> bool:
    trace = call.local.plan.trace
    return bool(call.requests) and any(
        op not in trace.forward and functions.calls_anywhere(trace.graph, op, "EagerPyFunc")
        for op in trace.operations
    )


def _ordered_transfers(
    microbatches: Sequence[Sequence[Call]], entries: Entries, timeline: Timeline
) -> list[Any]:
    """Returns the operations of those transfers of this process that need an order, in order."""
    ends = {one.action: one.end for actions in timeline.ranks for one in actions}
    found = []
    for microbatch, calls in enumerate(microbatches):
        for place, entry in enumerate(entries.all):
            call, request = calls[entry.place], entry.request_of(calls)
            operations = dict(request.transfers) if request else {}
            if not entry.is_apart:
                operations |= call.transfers
            for number, transfer in enumerate(call.local.plan.transfers):
                operation = operations.get(transfer)
                if operation is not None:
                    kind, segment = transfer.made_in
                    maker = entry if kind.is_backward else entries.of_call(entry.place)
                    planned = Kind.FORWARD if maker.is_apart else kind
                    end = ends[Action(planned, maker.segment(segment), microbatch)]
                    found.append(((end, place, microbatch, number), operation))
    return [operation for _, operation in sorted(found, key=lambda one: one[0])]


class _Joining:
    """Joins the segments of all calls of one microbatch to one graph.

    Args:
        calls: of a microbatch.
        entries: of them.
    """

    def __init__(self, calls: Sequence[Call], entries: Entries) -> None:
        self._calls = calls
        self._entries = entries
        self.segments: list[Segment] = []
        self.edges: dict[tuple[int, int], Edge] = {}
        self.waits: set[tuple[int, int]] = set()

    def add(self, entry: Entry) -> None:
        """Adds the segments of an entry, and what they wait for."""
        if entry.is_apart:
            self._add_request(entry)
        else:
            self._add_call(entry)

    def in_a_row(self, entry: Entry, later: Entry) -> None:
        """Lets an entry wait for the one before."""
        for pair in itertools.product(entry.segments(), later.segments()):
            self._lead(*pair)

    def _lead(self, source: int, target: int) -> None:
        self.edges.setdefault((source, target), Edge(source, target, 0, has_grad=False))

    def _add_call(self, entry: Entry) -> None:
        call = self._calls[entry.place]
        graph = call.local.plan.graph
        request = entry.request_of(self._calls)
        self.segments += [
            replace(
                segment,
                index=entry.segment(segment.index),
                has_backward=segment.has_backward and request is not None,
            )
            for segment in graph.segments
        ]
        for edge in graph.edges:
            pair = (entry.segment(edge.source), entry.segment(edge.target))
            has_grad = edge.has_grad and request is not None
            self.edges[pair] = Edge(*pair, edge.num_bytes, has_grad)
        for tensor, passes in zip(call.inputs, call.local.plan.input_passes, strict=True):
            makers = self._makers(self._entries.origins([tensor]))
            for pair in itertools.product(makers, _numbers(entry, passes)):
                self._lead(*pair)
        if request is None:
            return
        self.waits |= {(entry.segment(a), entry.segment(b)) for a, b in graph.backward_waits}
        for origins, readers in self._gradients(entry, request):
            self.waits.update(itertools.product(readers, self._makers(origins)))
            for other in map(self._entries.of_request, origins.requests):
                for pair in () if other.is_apart else itertools.product(readers, other.segments()):
                    size = self.edges[pair].num_bytes if pair in self.edges else 0
                    self.edges[pair] = Edge(*pair, size, has_grad=True)

    def _add_request(self, entry: Entry) -> None:
        call, own = self._calls[entry.place], self._entries.of_call(entry.place)
        graph = call.local.plan.graph
        self.segments += [
            Segment(entry.segment(each.index), each.rank, each.backward_cost, 0.0, False)
            for each in reversed(graph.segments)
        ]
        for edge in graph.edges:
            if edge.has_grad:
                self._lead(entry.segment(edge.target), entry.segment(edge.source))
        for late, early in graph.backward_waits:
            self._lead(own.segment(early), entry.segment(late))
        for one in range(entry.size):
            self._lead(own.segment(one), entry.segment(one))
        request = entry.request_of(self._calls)
        assert request is not None
        for origins, readers in self._gradients(entry, request):
            for pair in itertools.product(self._makers(origins), readers):
                self._lead(*pair)

    def _gradients(self, entry: Entry, request: Request) -> Iterator[tuple[Origins, list[int]]]:
        """Yields what each gradient that a request is given comes from, and its readers."""
        plan = self._calls[entry.place].local.plan
        for gradient, passes in zip(request.given, plan.gradient_passes, strict=True):
            yield self._entries.origins([gradient]), _numbers(entry, passes)

    def _makers(self, origins: Origins) -> list[int]:
        """Returns the segments whose forward passes in the plan make what something comes from."""
        made = []
        for place, output in origins.results:
            made_in = self._calls[place].local.plan.output_passes[output]
            if made_in is not None:
                made.append(self._entries.of_call(place).segment(made_in[1]))
        for entry in map(self._entries.of_request, origins.requests):
            made += entry.segments() if entry.is_apart else ()
        return made


def _numbers(entry: Entry, passes: Iterable[Pass]) -> list[int]:
    return [entry.segment(segment) for _, segment in passes]


def _joined(
    calls: Sequence[Call], entries: Entries, num_partitions: int, in_a_row: bool
) -> SegmentGraph:
    """Returns the segments of all calls of one microbatch as one graph.

    Args:
        calls: of a microbatch.
        entries: of them.
        num_partitions: of the model.
        in_a_row: each call waits for the one before.
    """
    joining = _Joining(calls, entries)
    for entry in entries.all:
        joining.add(entry)
    for entry, later in pairwise(entries.all) if in_a_row else ():
        joining.in_a_row(entry, later)
    return SegmentGraph(
        tuple(joining.segments),
        tuple(joining.edges.values()),
        num_partitions,
        tuple(sorted(joining.waits)),
    )
