"""What this process executes of a plan: one TensorFlow function a pass, made once.

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
from smdistributed.modelparallel.tensorflow.compat import executors, graphs
from smdistributed.modelparallel.tensorflow.execute.random import RandomOperations
from smdistributed.modelparallel.tensorflow.planning.segments import Pass, Plan
from smdistributed.modelparallel.tensorflow.record.sizes import is_constant
from smdistributed.modelparallel.tensorflow.record.tracing import (
    FOLLOWS,
    LAYER,
    PARTITION,
    results_of,
)

_DROPPED = (PARTITION, LAYER, FOLLOWS, "_class")


@dataclass(eq=False)
class Program:
    """One pass of one segment of this process.

    Attributes:
        one: the pass.
        function: takes a random key, then ``inputs``; returns ``outputs``.
        inputs: tensors of the trace that other passes, other processes, or callers make.
        outputs: tensors of the trace that others need.
        read: names of captured resources that it only reads.
        changed: names of those that it may change.
        executor: what runs it, see ``executors``.
    """

    one: Pass
    function: Any
    inputs: list[Any]
    outputs: list[Any]
    read: list[str]
    changed: list[str]
    executor: str


class LocalPrograms:
    """The programs of this process, and what it receives and sends.

    Args:
        plan: of the whole pipeline.
        partition: of this process.
        unseeded: see ``RandomOperations``.
        is_alone: this is the only process.
        has_one_core: this process computes on one core, and on no other device.

    Attributes:
        plan: as given.
        programs: in the order of execution of one microbatch.
        received: transfers to this process.
        sent: transfers from this process.
    """

    def __init__(
        self, plan: Plan, partition: int, unseeded: int, is_alone: bool, has_one_core: bool
    ) -> None:
        self.plan = plan
        self._has_one_core = has_one_core
        self.received = [each for each in plan.transfers if each.target == partition]
        trace = plan.trace
        self._random = RandomOperations(trace.graph, trace.operations, unseeded, is_alone, _DROPPED)
        self._consumers = _consumers(plan)
        own = [
            (one, ops)
            for one, ops in plan.passes.items()
            if plan.partitions[one[1]] == partition and ops
        ]
        self.sent = [each for each in plan.transfers if each.source == partition]
        asked_for = {tensor.name for tensor in results_of(plan.trace)}
        asked_for |= {transfer.tensor.name for transfer in self.sent}
        self.programs = [self._program(one, ops, asked_for) for one, ops in own]
        self.programs.sort(key=_order)

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn that depend on the place of what draws them."""
        return bool(self._random)

    def _program(self, one: Pass, ops: list[Any], asked_for: set[str]) -> Program:
        graph = graphs.new_graph(f"{one[0].name.lower()}_{one[1]}")
        graphs.take_functions(graph, self.plan.trace.graph)
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
            waits = [copied[earlier] for earlier in op.control_inputs if earlier in copied]
            if op in self._random:
                copied[op], results = self._random.replaced(op, operands, key, waits)
            else:
                copied[op] = graphs.copy_operation(graph, op, operands, waits, _DROPPED)
                results = copied[op].outputs
            for old, new in zip(op.outputs, results, strict=True):
                copies[old.name] = new
        outputs = [
            tensor
            for op in ops
            for tensor in op.outputs
            if tensor.name in asked_for
            or any(self.plan.pass_of.get(each) != one for each in self._consumers[tensor.name])
        ]
        effects = [copied[op] for op in ops if graphs.is_stateful(copied[op])]
        results = [copies[tensor.name] for tensor in outputs]
        always = list(dict.fromkeys([*effects, *(result.op for result in results)]))
        function = graphs.function_of(graph, [key, *placeholders], results, always)
        used = self.plan.resources[one]
        read = [name for name, is_changed in used.items() if not is_changed]
        changed = [name for name, is_changed in used.items() if is_changed]
        executor = executors.USUAL
        if self._has_one_core:
            executor = executors.executor_of(graph.get_operations())
        return Program(one, function, inputs, outputs, read, changed, executor)


def _order(program: Program) -> tuple[bool, int]:
    kind, segment = program.one
    is_backward = kind is Kind.BACKWARD
    return is_backward, -segment if is_backward else segment


def _consumers(plan: Plan) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for op in plan.pass_of:
        for tensor in op.inputs:
            found[tensor.name].append(op)
    return found


def constants(graph: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """Returns copies of those tensors of a trace that are constants, by name."""
    return {
        tensor.name: graphs.copy_operation(graph, tensor.op, [], [], _DROPPED).outputs[0]
        for tensor in tensors
        if is_constant(tensor.op)
    }
