"""What this process executes of a program: one TensorFlow function a pass, made once.

All microbatches call the same functions, so that the time to build a step does not grow with the
operations of the model times the number of microbatches, and a pass starts and ends as a whole,
which lets the schedule order passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.execute.random import RandomOperations
from smdistributed.modelparallel.tensorflow.plan.placement import is_constant
from smdistributed.modelparallel.tensorflow.plan.segments import Pass, Program
from smdistributed.modelparallel.tensorflow.record.tracing import (
    FOLLOWS,
    LAYER,
    PARTITION,
    results_of,
)

_DROPPED = (PARTITION, LAYER, FOLLOWS, "_class")


@dataclass(eq=False)
class Block:
    """One pass of one segment of this process.

    Attributes:
        one: the pass.
        function: takes a random key, then ``inputs``; returns ``outputs``.
        inputs: tensors of the trace that other passes, other processes, or callers make.
        outputs: tensors of the trace that others need.
    """

    one: Pass
    function: Any
    inputs: list[Any]
    outputs: list[Any]


class LocalProgram:
    """The blocks of this process and what it receives.

    Args:
        program: of the whole pipeline.
        partition: of this process.
        unseeded: see ``RandomOperations``.

    Attributes:
        program: as given.
        blocks: in the order of execution of one microbatch.
        received: transfers to this process.
        sent: transfers from this process.
        written: names of captured handles that some block writes to.
    """

    def __init__(self, program: Program, partition: int, unseeded: int) -> None:
        self.program = program
        self.received = [each for each in program.transfers if each.target == partition]
        self._random = RandomOperations(program.trace, unseeded)
        self._consumers = _consumers(program)
        own = [
            (one, ops)
            for one, ops in program.passes.items()
            if program.partitions[one[1]] == partition and ops
        ]
        self.sent = [each for each in program.transfers if each.source == partition]
        asked_for = {tensor.name for tensor in results_of(program.trace)}
        asked_for |= {transfer.tensor.name for transfer in self.sent}
        self.blocks = [self._block(one, ops, asked_for) for one, ops in own]
        self.blocks.sort(key=_order)
        self.written = {
            tensor.name
            for one, ops in own
            for op in ops
            if not _only_reads(op)
            for tensor in op.inputs
            if tensor.name in program.trace.captured and tensor.dtype == tf.resource
        }

    def _block(self, one: Pass, ops: list[Any], asked_for: set[str]) -> Block:
        graph = graphs.new_graph(f"{one[0].name.lower()}_{one[1]}")
        graphs.take_functions(graph, self.program.trace.graph)
        with graph.as_default():
            key = tf.compat.v1.placeholder(tf.int64, [2])
        copies: dict[str, Any] = {}
        copied: dict[Any, Any] = {}
        inputs: list[Any] = []
        placeholders: list[Any] = []

        def copy_of(tensor: Any) -> Any:
            if tensor.name not in copies:
                if is_constant(tensor.op):
                    constant = graphs.copy_operation(graph, tensor.op, [], [], _DROPPED)
                    copies[tensor.name] = constant.outputs[0]
                else:
                    inputs.append(tensor)
                    placeholders.append(graphs.placeholder(graph, tensor))
                    copies[tensor.name] = placeholders[-1]
            return copies[tensor.name]

        for op in ops:
            operands = [copy_of(tensor) for tensor in op.inputs]
            if op in self._random:
                with graph.as_default():
                    results = [self._random.draw(op, operands, key)]
                copied[op] = results[0].op
            else:
                waits = [copied[earlier] for earlier in op.control_inputs if earlier in copied]
                copied[op] = graphs.copy_operation(graph, op, operands, waits, _DROPPED)
                results = copied[op].outputs
            for old, new in zip(op.outputs, results, strict=True):
                copies[old.name] = new
        outputs = [
            tensor
            for op in ops
            for tensor in op.outputs
            if tensor.name in asked_for
            or any(self.program.pass_of.get(each) != one for each in self._consumers[tensor.name])
        ]
        effects = [copied[op] for op in ops if graphs.is_stateful(copied[op])]
        results = [copies[tensor.name] for tensor in outputs]
        always = list(dict.fromkeys([*effects, *(result.op for result in results)]))
        function = graphs.function_of(graph, [key, *placeholders], results, always)
        return Block(one, function, inputs, outputs)


def _order(block: Block) -> tuple[bool, int]:
    kind, segment = block.one
    is_backward = kind is Kind.BACKWARD
    return is_backward, -segment if is_backward else segment


def _consumers(program: Program) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for op in program.pass_of:
        for tensor in op.inputs:
            found[tensor.name].append(op)
    return found


def _only_reads(op: Any) -> bool:
    return op.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def constants(graph: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """Returns copies of those tensors of a trace that are constants, by name."""
    return {
        tensor.name: graphs.copy_operation(graph, tensor.op, [], [], _DROPPED).outputs[0]
        for tensor in tensors
        if is_constant(tensor.op)
    }
