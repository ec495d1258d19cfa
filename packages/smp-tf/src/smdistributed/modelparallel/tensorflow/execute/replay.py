"""Calls of a model in the graph of a step: programs, transfers, and gradients.

Each call of the model in the body of a step function becomes the forward programs of this
process, with receives before and sends after them; where the body asks for gradients, the backward
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.tensorflow.compat import graphs, resources
from smdistributed.modelparallel.tensorflow.compat.gradients import unrecorded, watched
from smdistributed.modelparallel.tensorflow.execute.backward import Backward
from smdistributed.modelparallel.tensorflow.execute.links import Key, Links
from smdistributed.modelparallel.tensorflow.execute.program import LocalPrograms, constants
from smdistributed.modelparallel.tensorflow.parameters.variables import home_of
from smdistributed.modelparallel.tensorflow.plan.segments import Pass, Transfer
from smdistributed.modelparallel.tensorflow.record.tracing import results_of


@dataclass(eq=False)
class Call:
    """One call of the model for one microbatch, in the graph of a step.

    Attributes:
        local: what this process executes.
        inputs: tensors that the call was given.
        results: the operation whose outputs are the results of the call.
        operations: of each pass of this process that is in the graph.
        transfers: operation of each transfer of this process that must be put in an order.
        gradients: the gradients that the body computed of the outputs; None until it asks.
        returned: operations that bring gradients of the call.
    """

    local: LocalPrograms
    inputs: list[Any]
    results: Any = None
    operations: dict[Pass, Any] = field(default_factory=dict)
    transfers: dict[Transfer, Any] = field(default_factory=dict)
    gradients: list[Any] | None = None
    returned: set[Any] = field(default_factory=set)


class Replay:
    """Adds the calls of one step function to its graph.

    Args:
        links: of this process.
        ranks: global rank of every partition in this pipeline.
    """

    def __init__(self, links: Links, ranks: Sequence[int]) -> None:
        self._links = links
        self._ranks = ranks

    def call(
        self,
        local: LocalPrograms,
        inputs: Sequence[Any],
        key: Any,
        anchors: Sequence[Any],
    ) -> tuple[list[Any], Call]:
        """Adds a call; returns its outputs and what is known of it.

        Shape: inputs of (microbatch, ...); outputs are those of the traced call, on all ranks.

        Args:
            local: what this process executes.
            inputs: tensors of the present graph.
            key: of random operations, int64 of shape [2].
            anchors: variables that stand for missing ones where this process trains few. Their
                gradients are zero.
        """
        trace = local.plan.trace
        graph = tf.compat.v1.get_default_graph()
        call = Call(local, list(inputs))
        values: dict[str, Any] = {}
        for placeholder, tensor in zip(trace.inputs, inputs, strict=True):
            values[placeholder.name] = tensor
        needed = {tensor.name for program in local.programs for tensor in program.inputs}
        for name, outside in trace.captured.items():
            if name in needed:
                values[name] = graphs.capture(graph, outside)
        values |= constants(graph, list(results_of(trace)))
        keys = {transfer: self._links.new_key(transfer.tensor) for transfer in local.plan.transfers}
        with unrecorded():
            self._run(call, Kind.FORWARD, values, keys, key)
            outputs = [values[output.name] for output in trace.outputs]
        mine = [
            (variable, gradient)
            for variable, gradient in zip(trace.variables, trace.variable_gradients, strict=True)
            if variable._smp_home.is_here
        ]
        mine += [
            (variable, gradient)
            for variable, gradient in zip(trace.others, trace.other_gradients, strict=True)
            if (home := home_of(variable)) is None or home.is_here
        ]
        reads = [variable.read_value() for variable, _ in mine]
        # Of a process that has none of the variables that a tape watches others wait for its part.
        reads += [watched(anchor.read_value()) for anchor in anchors]
        backward = Backward(
            call,
            values,
            lambda: self._run(call, Kind.BACKWARD, values, keys, key),
            outputs,
            [*inputs, *reads],
            [gradient for _, gradient in mine],
            len(anchors),
        )
        return backward.attached(), call

    def _run(
        self, call: Call, phase: Kind, values: dict[str, Any], keys: dict[Transfer, Key], key: Any
    ) -> None:
        """Adds the programs of a phase, with its transfers."""
        local = call.local
        graph = tf.compat.v1.get_default_graph()
        # A transfer that no operation here needs must take place all the same: the other side waits
        # for it.
        kept: list[Any] = []
        for transfer in local.received:
            if transfer.phase is phase:
                received, operation = self._links.receive(
                    transfer.tensor, self._ranks[transfer.source], keys[transfer]
                )
                kept.append(operation)
                if self._links.needs_order(transfer.tensor):
                    call.transfers[transfer] = operation
                values[transfer.tensor.name] = received
        for transfer in local.sent:
            if transfer.phase is phase and transfer.made_in[0] is not phase:
                kept += self._send(call, transfer, values, keys)
        for program in local.programs:
            if program.one[0] is not phase:
                continue
            operands = [values[tensor.name] for tensor in program.inputs]
            # Passes have an order of their own. With resources they wait for what else uses these,
            # but not for each other in the order in which they are made here.
            read = [values[name] for name in program.read]
            changed = [values[name] for name in program.changed]
            with tf.control_dependencies(resources.before(read, changed)):
                operation = graphs.call(program.function, [key, *operands])
            resources.after(operation, read, changed)
            kept.append(operation)
            call.operations[program.one] = operation
            for tensor, made in zip(program.outputs, operation.outputs, strict=True):
                made.set_shape(tensor.shape)
                values[tensor.name] = made
            for transfer in local.sent:
                if transfer.phase is phase and transfer.made_in == program.one:
                    kept += self._send(call, transfer, values, keys)
        graphs.keep(graph, kept)

    def _send(
        self, call: Call, transfer: Transfer, values: dict[str, Any], keys: dict[Transfer, Key]
    ) -> list[Any]:
        operations = self._links.send(
            values[transfer.tensor.name], self._ranks[transfer.target], keys[transfer]
        )
        if self._links.needs_order(transfer.tensor):
            call.transfers[transfer] = operations[-1]
        return operations
