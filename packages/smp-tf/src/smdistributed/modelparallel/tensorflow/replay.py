"""Calls of a model in the graph of a step: local blocks, transfers, and gradients.

Each call of the model in the body of a step function becomes the forward blocks of this process,
with receives before and sends after them; where the body asks for gradients, the backward blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.tensorflow import compat
from smdistributed.modelparallel.tensorflow.blocks import Block, LocalProgram, constants
from smdistributed.modelparallel.tensorflow.segmentation import Pass
from smdistributed.modelparallel.tensorflow.tracing import results_of, tensors_in
from smdistributed.modelparallel.tensorflow.transport import Transport

#: Keys of one transfer: of the tensor, and of its shape.
_KEYS = 2


@dataclass(eq=False)
class Call:
    """One call of the model for one microbatch, in the graph of a step.

    Attributes:
        local: what this process executes.
        inputs: tensors that the call was given.
        results: the operation whose outputs are the results of the call.
        operations: of each pass of this process that is in the graph.
        gradients: the gradients that the body computed of the outputs; None until it asks.
        returned: operations that bring gradients of the call.
    """

    local: LocalProgram
    inputs: list[Any]
    results: Any = None
    operations: dict[Pass, Any] = field(default_factory=dict)
    gradients: list[Any] | None = None
    returned: set[Any] = field(default_factory=set)


class Replay:
    """Adds the calls of one step function to its graph.

    Args:
        transport: of this process.
        ranks: global rank of every partition in this pipeline.
        partition: of this process.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], partition: int) -> None:
        self._transport = transport
        self._ranks = ranks
        self._partition = partition

    def call(
        self,
        local: LocalProgram,
        inputs: Sequence[Any],
        key: Any,
        anchor: Any,
    ) -> tuple[list[Any], Call]:
        """Adds a call; returns its outputs and what is known of it.

        Args:
            local: what this process executes.
            inputs: tensors of the present graph.
            key: of random operations, int64 of shape [2].
            anchor: a variable that stands for the missing ones where this process trains none.
        """
        trace = local.program.trace
        graph = tf.compat.v1.get_default_graph()
        call = Call(local, list(inputs))
        values: dict[str, Any] = {}
        for placeholder, tensor in zip(trace.inputs, inputs, strict=True):
            values[placeholder.name] = tensor
        needed = {tensor.name for block in local.blocks for tensor in block.inputs}
        for name, outside in trace.captured.items():
            if name in needed:
                values[name] = compat.capture(graph, outside)
                if name in local.written:
                    # The order of passes decides about it, not that in which they are made here.
                    values[name] = tf.identity(values[name])
        values |= constants(graph, list(results_of(trace)))
        first_key = self._transport.new_keys(_KEYS * len(local.program.transfers))
        keys = {
            id(transfer): first_key + _KEYS * number
            for number, transfer in enumerate(local.program.transfers)
        }
        with compat.unrecorded():
            self._run(call, Kind.FORWARD, values, keys, key)
            outputs = [self._value(call, values, keys, output) for output in trace.outputs]
        mine = [
            (variable, gradient)
            for variable, gradient in zip(trace.variables, trace.variable_gradients, strict=True)
            if variable._smp_home.is_here
        ]
        reads = [variable.read_value() for variable, _ in mine]
        if not reads:
            reads = [anchor.read_value()]
        originals = [*outputs, *inputs, *reads]

        def gradient(*upstream: Any) -> list[Any]:
            if call.gradients is not None:
                raise SMPError(
                    "gradients of one call of the model were asked for twice in a step function: "
                    "ask for all of them at once, of the sum of the losses if there are several."
                )
            call.gradients = [
                dy if dy is not None else tf.zeros_like(output)
                for dy, output in zip(upstream, outputs, strict=False)
            ]
            for dy, given in zip(trace.output_gradients, call.gradients, strict=True):
                if dy is not None:
                    values[dy.name] = tf.convert_to_tensor(given)
            with compat.unrecorded():
                self._run(call, Kind.BACKWARD, values, keys, key)

                def found(wanted: Any) -> Any:
                    parts = [self._value(call, values, keys, t) for t in tensors_in(wanted)]
                    call.returned |= {part.op for part in parts}
                    if isinstance(wanted, tf.IndexedSlices):
                        return tf.IndexedSlices(*parts)
                    return parts[0] if parts else None

                of_inputs = [found(each) for each in trace.input_gradients]
                of_variables = [found(each) for _, each in mine] or [tf.zeros([])]
            return [None] * len(outputs) + of_inputs + of_variables

        results = compat.with_gradient(originals, gradient, "SmpCall")
        call.results = results[0].op
        return results[: len(outputs)], call

    def _run(
        self, call: Call, kind: Kind, values: dict[str, Any], keys: dict[int, int], key: Any
    ) -> None:
        graph = tf.compat.v1.get_default_graph()
        for block in call.local.blocks:
            if block.one[0] is not kind:
                continue
            operands = [self._value(call, values, keys, tensor) for tensor in block.inputs]
            operation = compat.call(block.function, [key, *operands])
            call.operations[block.one] = operation
            for tensor, made in zip(block.outputs, operation.outputs, strict=True):
                made.set_shape(tensor.shape)
                values[tensor.name] = made
            self._send(block, values, keys, graph)

    def _send(self, block: Block, values: dict[str, Any], keys: dict[int, int], graph: Any) -> None:
        for transfer in block.sends:
            made = self._transport.send(
                values[transfer.tensor.name], self._ranks[transfer.target], keys[id(transfer)]
            )
            # TensorFlow's automatic control dependencies do not keep sends.
            compat.keep(graph, made)

    def _value(self, call: Call, values: dict[str, Any], keys: dict[int, int], tensor: Any) -> Any:
        """Returns a tensor of the trace in this graph; receives it if another process makes it."""
        if tensor.name not in values:
            transfer = call.local.received.get(tensor.name)
            assert transfer is not None, f"{tensor.name} is made nowhere"
            received = self._transport.receive(
                tensor, self._ranks[transfer.source], keys[id(transfer)]
            )
            # Also if the step needs it nowhere: the other process sends it, and waits for that.
            compat.keep(received.graph, [received.op])
            values[tensor.name] = received
        return values[tensor.name]
