"""A placed trace as segments: what each partition executes between two transfers.

A segment is a maximal run of one partition's operations. Forward operations fall into segments by
the number of times that what they depend on changed the partition; gradients belong to the segment
of the forward operation that they differentiate, so that backward passes mirror forward passes.
Everything here is the same on all processes of a pipeline.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.schedule import (
    Edge,
    Kind,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.tensorflow.compat import graphs, resources
from smdistributed.modelparallel.tensorflow.record.sizes import is_constant, num_bytes
from smdistributed.modelparallel.tensorflow.record.tracing import Trace, tensors_in

#: A pass of a segment.
Pass = tuple[Kind, int]
#: The kinds of passes that a traced program has.
_KINDS = (Kind.FORWARD, Kind.BACKWARD)


@dataclass(frozen=True, eq=False)
class Transfer:
    """A tensor that one partition makes and another one needs, once a microbatch.

    Attributes:
        tensor: of the trace.
        made_in: the pass that makes it.
        source: partition.
        target: partition.
        phase: in which it goes. What only the backward pass needs goes then, so that a step without
            gradients sends nothing in vain.
    """

    tensor: Any
    made_in: Pass
    source: int
    target: int
    phase: Kind


@dataclass(eq=False)
class Plan:
    """A trace, cut into segments; the same on all processes of a pipeline.

    Attributes:
        trace: what was cut.
        partitions: of every segment.
        passes: operations of each pass, in order.
        pass_of: the pass of each operation.
        transfers: in one order on all processes.
        graph: segments and edges, for the planner.
        output_passes: of each output, the pass that makes it; None for inputs and constants.
        input_passes: of each input, the forward passes that read it.
        gradient_passes: of each output, the backward passes that read its gradient.
        resources: of each pass, the captured resources that it uses by name of their placeholders,
            and whether it may change them.
    """

    trace: Trace
    partitions: list[int]
    passes: dict[Pass, list[Any]]
    pass_of: dict[Any, Pass]
    transfers: list[Transfer]
    graph: SegmentGraph
    output_passes: list[Pass | None] = field(default_factory=list)
    input_passes: list[set[Pass]] = field(default_factory=list)
    gradient_passes: list[set[Pass]] = field(default_factory=list)
    resources: dict[Pass, dict[str, bool]] = field(default_factory=dict)

    def changed(self) -> set[int]:
        """Returns the ``id`` of each variable that some pass may change."""
        return {
            self.trace.variable_names[name]
            for used in self.resources.values()
            for name, is_changed in used.items()
            if is_changed and name in self.trace.variable_names
        }

    def digest(self) -> str:
        """Returns what all processes must agree on, as a short text."""
        text = hashlib.sha256()
        for one, ops in self.passes.items():
            text.update(f"{one} {[(op.type, op.name) for op in ops]}".encode())
        for transfer in self.transfers:
            tensor = transfer.tensor
            text.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {transfer.target}".encode())
        return text.hexdigest()


def cut(
    trace: Trace, placed: Mapping[Any, int], homes: dict[int, int], num_partitions: int
) -> Plan:
    """Returns a trace as segments.

    Args:
        trace: of the model.
        placed: partition of every forward operation but constants.
        homes: partition by ``id`` of TensorFlow's variable; variables that gradients alone use are
            added.
        num_partitions: of the model.
    """
    segment_of, partitions = _forward_segments(trace, placed)
    for variable, segment in _used_by_gradients(trace, segment_of).items():
        homes.setdefault(variable, partitions[segment])
    for name, op_segment in _backward_segments(trace, segment_of, partitions, homes).items():
        segment_of[name] = op_segment
    pass_of = {
        op: (Kind.FORWARD if op in trace.forward else Kind.BACKWARD, segment_of[op])
        for op in trace.operations
        if op in segment_of
    }
    passes: dict[Pass, list[Any]] = {
        (kind, segment): [] for kind in _KINDS for segment in range(len(partitions))
    }
    for op in trace.operations:
        if op in pass_of:
            passes[pass_of[op]].append(op)
    transfers = _transfers(trace, pass_of, partitions, homes, num_partitions)
    plan = Plan(
        trace,
        partitions,
        passes,
        pass_of,
        transfers,
        _segment_graph(passes, pass_of, partitions, num_partitions),
    )
    plan.resources = {one: _resources(trace, ops) for one, ops in passes.items()}
    plan.output_passes = [pass_of.get(output.op) for output in trace.outputs]
    readers: dict[str, set[Pass]] = defaultdict(set)
    for op, one in pass_of.items():
        for tensor in op.inputs:
            readers[tensor.name].add(one)
    plan.input_passes = [readers[x.name] for x in trace.inputs]
    plan.gradient_passes = [
        set() if dy is None else readers[dy.name] for dy in trace.output_gradients
    ]
    return plan


def _resources(trace: Trace, ops: Sequence[Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.dtype == tf.resource and tensor.name in trace.captured:
                is_changed = found.get(tensor.name, False) or resources.writes(op, tensor)
                found[tensor.name] = is_changed
    return found


def _dependencies(op: Any) -> Iterable[Any]:
    for tensor in op.inputs:
        yield tensor.op
    yield from op.control_inputs


def _forward_segments(trace: Trace, placed: Mapping[Any, int]) -> tuple[dict[Any, int], list[int]]:
    """Returns the segment of every forward operation, and the partition of every segment."""
    levels: dict[Any, int] = {}
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for op in trace.operations:
        if op not in placed:
            continue
        earlier = [each for each in _dependencies(op) if each in levels]
        level = max((levels[e] + (placed[e] != placed[op]) for e in earlier), default=0)
        levels[op] = level
        own = (level, placed[op])
        blocks = {(levels[each], placed[each]) for each in earlier}
        waits.setdefault(own, set()).update(blocks - {own})
    merged = _merge(waits)
    order = _ordered(waits, merged)
    numbers = {block: number for number, block in enumerate(order)}
    segment_of = {op: numbers[merged[level, placed[op]]] for op, level in levels.items()}
    return segment_of, [partition for _, partition in order]


def _merge(waits: dict[tuple[int, int], set[tuple[int, int]]]) -> dict[Any, Any]:
    """Joins runs of a partition that need not be apart; returns what each became.

    A run that waits for little may be executed together with the next one of its partition if
    nothing in between needs it: if nobody else waits for it but those that wait for the next, too.
    """
    became = {block: block for block in waits}

    def now() -> dict[Any, set[Any]]:
        joined: dict[Any, set[Any]] = {}
        for block, earlier in waits.items():
            own = joined.setdefault(became[block], set())
            own |= {became[each] for each in earlier}
            own.discard(became[block])
        return joined

    def all_before(joined: Mapping[Any, set[Any]]) -> dict[Any, set[Any]]:
        before: dict[Any, set[Any]] = {}
        for block in sorted(joined):  # by level, so that what is waited for comes first
            before[block] = set(joined[block]).union(*(before[each] for each in joined[block]))
        return before

    changed = True
    while changed:
        changed = False
        joined = now()
        before = all_before(joined)
        for partition in sorted({block[1] for block in joined}):
            run = sorted(block for block in joined if block[1] == partition)
            for first, second in itertools.pairwise(run):
                between = {b for b in before[second] if b != first and first in before[b]}
                others = {b for b in joined if first in joined[b] and b != second}
                if between or any(second not in before[b] for b in others):
                    continue
                for block, own in became.items():
                    if own == first:
                        became[block] = second
                changed = True
                break
            if changed:
                break
    return became


def _ordered(waits: Mapping[Any, set[Any]], became: Mapping[Any, Any]) -> list[Any]:
    """Returns the segments, each after those that it waits for."""
    left: dict[Any, set[Any]] = {}
    for block, earlier in waits.items():
        own = left.setdefault(became[block], set())
        own |= {became[each] for each in earlier} - {became[block]}
    order: list[Any] = []
    while left:
        ready = min(block for block, earlier in left.items() if not earlier)
        del left[ready]
        for earlier in left.values():
            earlier.discard(ready)
        order.append(ready)
    return order


def _backward_segments(
    trace: Trace,
    forward: Mapping[Any, int],
    partitions: Sequence[int],
    homes: Mapping[int, int],
) -> dict[Any, int]:
    """Returns the segment of every backward operation.

    A backward pass runs from the last segment to the first, so an operation can be in the segment
    of the operation that it differentiates unless it reads gradients made later, in an earlier one.
    """
    by_name = {op.name: op for op in forward}
    last = len(partitions) - 1
    dy_segments = {
        dy.name: forward.get(output.op, last)
        for output, dy in zip(trace.outputs, trace.output_gradients, strict=True)
        if dy is not None
    }
    ops = [
        op
        for op in trace.operations
        if op not in trace.forward and op not in forward and not is_constant(op)
    ]
    found: dict[Any, int] = {}
    for op in ops:
        bound = min(
            (found[each] for each in _dependencies(op) if each in found),
            default=last,
        )
        beside = graphs.colocated_with(op)
        wanted = [forward[by_name[name]] for name in beside if name in by_name]
        wanted += [dy_segments[tensor.name] for tensor in op.inputs if tensor.name in dy_segments]
        reads = any(each in found for each in _dependencies(op))
        handles = _handles(trace, op)
        if not wanted and not reads:
            wanted = [forward[tensor.op] for tensor in op.inputs if tensor.op in forward]
            if not wanted and not handles:
                # It reads constants and inputs only: it goes with the variable that it is about,
                # or with what reads it.
                handles = [f"{n}:0" for n in beside if f"{n}:0" in trace.variable_names]
                if not handles:
                    continue
        segment = min([bound, *wanted[:1]])
        for handle in handles:
            home = homes.get(trace.variable_names[handle])
            if home is not None and partitions[segment] != home:
                segment = _latest(partitions, home, bound, op)
        found[op] = segment
    for op in reversed(ops):
        if op not in found:
            readers = [
                found[each] for tensor in op.outputs for each in tensor.consumers() if each in found
            ]
            found[op] = max(readers, default=last)
    return found


def _used_by_gradients(trace: Trace, forward: Mapping[Any, int]) -> dict[int, int]:
    """Returns variables that gradients use, with the segment that these differentiate.

    One that the forward pass uses has a home already.
    """
    by_name = {op.name: op for op in forward}
    found: dict[int, int] = {}
    for op in trace.operations:
        handles = [] if op in trace.forward else _handles(trace, op)
        if not handles:
            continue
        # An operation on a variable stands beside that; those around it beside what they are for.
        around = [op, *(each for tensor in op.outputs for each in tensor.consumers())]
        around += [tensor.op for tensor in op.inputs]
        beside = [name for each in around for name in graphs.colocated_with(each)]
        segments = [forward[by_name[name]] for name in beside if name in by_name]
        for handle in handles:
            if segments:
                found.setdefault(trace.variable_names[handle], segments[0])
    return found


def _handles(trace: Trace, op: Any) -> list[str]:
    return [tensor.name for tensor in op.inputs if tensor.name in trace.variable_names]


def _latest(partitions: Sequence[int], home: int, bound: int, op: Any) -> int:
    for segment in range(bound, -1, -1):
        if partitions[segment] == home:
            return segment
    raise PartitionError(
        f"the gradient {op.name} touches a variable of partition {home} after the last backward "
        "pass there: keep the operations that read the variable on one partition with those that "
        "use it."
    )


def _transfers(
    trace: Trace,
    pass_of: Mapping[Any, Pass],
    partitions: Sequence[int],
    homes: Mapping[int, int],
    num_partitions: int,
) -> list[Transfer]:
    found: dict[tuple[str, int], Transfer] = {}

    def want(tensor: Any, target: int, phase: Kind) -> None:
        made_in = pass_of.get(tensor.op)
        if made_in is None or partitions[made_in[1]] == target:
            return
        source = partitions[made_in[1]]
        found.setdefault((tensor.name, target), Transfer(tensor, made_in, source, target, phase))

    for phase in _KINDS:  # forward first
        for op, (kind, segment) in pass_of.items():
            if kind is phase:
                for tensor in op.inputs:
                    want(tensor, partitions[segment], phase)
        if phase is Kind.FORWARD:
            for output in trace.outputs:
                for partition in range(num_partitions):
                    want(output, partition, phase)
    for variable, gradient in zip(trace.variables, trace.variable_gradients, strict=True):
        if id(variable) in homes:
            for tensor in tensors_in(gradient):
                want(tensor, homes[id(variable)], Kind.BACKWARD)
    for gradient in (*trace.input_gradients, *trace.other_gradients):
        for tensor in tensors_in(gradient):
            for partition in range(num_partitions):
                want(tensor, partition, Kind.BACKWARD)
    return list(found.values())


def _segment_graph(
    passes: Mapping[Pass, list[Any]],
    pass_of: Mapping[Any, Pass],
    partitions: Sequence[int],
    num_partitions: int,
) -> SegmentGraph:
    """Returns what waits for what, for the planner; costs are numbers of operations."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    returned: set[tuple[int, int]] = set()
    late: set[tuple[int, int]] = set()
    seen: set[tuple[str, Pass]] = set()
    for op, own in pass_of.items():
        pairs = [(tensor.op, tensor) for tensor in op.inputs]
        pairs += [(earlier, None) for earlier in op.control_inputs]
        for maker, tensor in pairs:
            made_in = pass_of.get(maker)
            if made_in is None or made_in == own:
                continue
            if own[0] is Kind.FORWARD:
                pair = (made_in[1], own[1])
                size = 0 if tensor is None or (tensor.name, own) in seen else num_bytes(tensor)
                sizes[pair] += size
                if tensor is not None:
                    seen.add((tensor.name, own))
            elif made_in[0] is Kind.FORWARD:
                late.add((own[1], made_in[1]))
            else:
                pair = (own[1], made_in[1])
                returned.add(pair)
                sizes.setdefault(pair, 0)
    segments = tuple(
        Segment(
            index,
            partition,
            float(len(passes[Kind.FORWARD, index])),
            float(len(passes[Kind.BACKWARD, index])),
            has_backward=bool(passes[Kind.BACKWARD, index]),
        )
        for index, partition in enumerate(partitions)
    )
    edges = tuple(
        Edge(source, target, size, has_grad=(source, target) in returned)
        for (source, target), size in sorted(sizes.items())
    )
    return SegmentGraph(segments, edges, num_partitions, tuple(sorted(late)))
