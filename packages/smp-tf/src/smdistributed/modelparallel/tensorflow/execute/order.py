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
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.planning.schedule import (
    Action,
    Edge,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import (
    CostModel,
    Timeline,
    build_schedule,
)
from smdistributed.modelparallel.tensorflow.compat import functions, graphs
from smdistributed.modelparallel.tensorflow.execute.links import Links
from smdistributed.modelparallel.tensorflow.execute.replay import Call


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
    calls = microbatches[0]
    for number, others in enumerate(microbatches):
        if len(others) != len(calls):
            raise SMPError(
                f"a step function calls the model as often for each microbatch; it called it "
                f"{len(calls)} times for microbatch 0 and {len(others)} times for microbatch "
                f"{number}: make the number of calls independent of the microbatch."
            )
    offsets = [0]
    for call in calls:
        offsets.append(offsets[-1] + len(call.local.plan.partitions))
    in_a_row = is_serial or _share_state(calls) or any(map(_keeps_tapes, calls))
    graph = _joined(calls, offsets, num_partitions, in_a_row)
    if in_a_row:
        pipeline, active_microbatches = "interleaved", 1
    timeline = build_schedule(
        graph, len(microbatches), pipeline, active_microbatches, CostModel.unmeasured(graph)
    )
    here = tf.compat.v1.get_default_graph()
    order = []
    for action in timeline.schedule.ranks[partition]:
        place = max(n for n, offset in enumerate(offsets[:-1]) if offset <= action.segment)
        one = (action.kind, action.segment - offsets[place])
        operation = microbatches[action.microbatch][place].operations.get(one)
        # What is in a loop or a branch of the body waits for its data alone.
        if operation is not None and operation.graph is here:
            order.append(operation)
    for earlier, later in pairwise(order):
        graphs.add_control_input(later, earlier)
    links.in_order(_ordered_transfers(microbatches, offsets, timeline))
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


def _keeps_tapes(call: Call) -> bool:
    """Tells whether a gradient of a ``tf.py_function`` is computed.

    TensorFlow keeps the tape of the newest forward pass alone, by the operation, so that the
    backward pass of a microbatch must follow its forward pass.
    """
    trace = call.local.plan.trace
    return call.gradients is not None and any(
        op not in trace.forward and functions.calls_anywhere(trace.graph, op, "EagerPyFunc")
        for op in trace.operations
    )


def _ordered_transfers(
    microbatches: Sequence[Sequence[Call]], offsets: Sequence[int], timeline: Timeline
) -> list[Any]:
    """Returns the operations of those transfers of this process that need an order, in order."""
    ends = {one.action: one.end for actions in timeline.ranks for one in actions}
    found = []
    for microbatch, calls in enumerate(microbatches):
        for place, call in enumerate(calls):
            for number, transfer in enumerate(call.local.plan.transfers):
                operation = call.transfers.get(transfer)
                if operation is not None:
                    kind, segment = transfer.made_in
                    end = ends[Action(kind, offsets[place] + segment, microbatch)]
                    found.append(((end, place, microbatch, number), operation))
    return [operation for _, operation in sorted(found, key=lambda one: one[0])]


def _joined(
    calls: Sequence[Call], offsets: Sequence[int], num_partitions: int, in_a_row: bool
) -> SegmentGraph:
    """Returns the segments of all calls of one microbatch as one graph.

    Args:
        calls: of a microbatch.
        offsets: number of the first segment of each call.
        num_partitions: of the model.
        in_a_row: each call waits for the one before.
    """
    segments: list[Segment] = []
    edges: dict[tuple[int, int], Edge] = {}
    waits: set[tuple[int, int]] = set()
    for call, offset in zip(calls, offsets, strict=False):
        graph = call.local.plan.graph
        is_differentiated = call.gradients is not None
        segments += [
            Segment(
                offset + segment.index,
                segment.rank,
                segment.forward_cost,
                segment.backward_cost,
                segment.has_backward and is_differentiated,
            )
            for segment in graph.segments
        ]
        for edge in graph.edges:
            pair = (offset + edge.source, offset + edge.target)
            edges[pair] = Edge(*pair, edge.num_bytes, edge.has_grad and is_differentiated)
        if is_differentiated:
            waits |= {(offset + late, offset + early) for late, early in graph.backward_waits}
    for number, call in enumerate(calls):
        _link(calls, number, call, offsets, edges, waits)
    for begin, middle, end in (
        zip(offsets, offsets[1:], offsets[2:], strict=False) if in_a_row else ()
    ):
        for pair in itertools.product(range(begin, middle), range(middle, end)):
            edges.setdefault(pair, Edge(*pair, 0, has_grad=False))
    return SegmentGraph(
        tuple(segments), tuple(edges.values()), num_partitions, tuple(sorted(waits))
    )


def _link(
    calls: Sequence[Call],
    number: int,
    call: Call,
    offsets: Sequence[int],
    edges: dict[tuple[int, int], Edge],
    waits: set[tuple[int, int]],
) -> None:
    """Adds what one call waits for from others, or from its own results."""
    plan = call.local.plan
    for placeholder, tensor in enumerate(call.inputs):
        forward, backward = _origins(calls, [tensor])
        if backward:
            raise UnsupportedError(
                "gradients of one call of the model feed another call in the same step function: "
                "make two step functions of it, one for each call."
            )
        readers = {segment for _, segment in plan.input_passes[placeholder]}
        for other, output in forward:
            made_in = calls[other].local.plan.output_passes[output]
            for reader in readers if made_in is not None else ():
                assert made_in is not None
                pair = (offsets[other] + made_in[1], offsets[number] + reader)
                edges.setdefault(pair, Edge(*pair, 0, has_grad=False))
    if call.gradients is None:
        return
    for position, gradient in enumerate(call.gradients):
        passes = {segment for _, segment in plan.gradient_passes[position]}
        forward, backward = _origins(calls, [gradient])
        for reader in passes:
            for other, output in forward:
                made_in = calls[other].local.plan.output_passes[output]
                if made_in is not None:
                    waits.add((offsets[number] + reader, offsets[other] + made_in[1]))
            for other in backward:
                if other <= number:
                    raise UnsupportedError(
                        "gradients of a call of the model depend on those of an earlier call: "
                        "gradients of gradients are not supported over partitions."
                    )
                later = calls[other].local.plan
                for segment in range(len(later.partitions)):
                    pair = (offsets[number] + reader, offsets[other] + segment)
                    size = edges[pair].num_bytes if pair in edges else 0
                    edges[pair] = Edge(*pair, size, has_grad=True)


def _origins(
    calls: Sequence[Call], tensors: Iterable[Any]
) -> tuple[set[tuple[int, int]], set[int]]:
    """Returns what tensors of the step's graph come from.

    Returns:
        results, as (call, output), and calls whose gradients they come from.
    """
    results = {call.results: number for number, call in enumerate(calls)}
    returned: dict[Any, int] = defaultdict(int)
    for number, call in enumerate(calls):
        returned.update(dict.fromkeys(call.returned, number))
    forward: set[tuple[int, int]] = set()
    backward: set[int] = set()
    stack = [tensor for tensor in tensors if hasattr(tensor, "op")]
    seen: set[Any] = set()
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if op in results:
            # One operation gives all results of a call, so that each of them waits for all.
            number = results[op]
            count = len(calls[number].local.plan.trace.outputs)
            forward |= {(number, output) for output in range(count)}
            continue
        if op in returned:
            backward.add(returned[op])
            continue
        if op in seen:
            continue
        seen.add(op)
        stack += list(op.inputs)
        stack += [earlier.outputs[0] for earlier in op.control_inputs if earlier.outputs]
    return forward, backward
