"""Calls of a model in the graph of a step: programs, transfers, and gradients.

Each call of the model in the body of a step function becomes the forward programs of this
process, with receives before and sends after them; where the body asks for gradients, the backward
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.tensorflow.compat import graphs, resources
from smdistributed.modelparallel.tensorflow.compat.gradients import accessed, unrecorded, watched
from smdistributed.modelparallel.tensorflow.execute.backward import Backward, Differentiate
from smdistributed.modelparallel.tensorflow.execute.links import Key, Links
from smdistributed.modelparallel.tensorflow.execute.program import LocalPrograms, constants
from smdistributed.modelparallel.tensorflow.parameters.variables import is_here
from smdistributed.modelparallel.tensorflow.planning.segments import Pass, Transfer
from smdistributed.modelparallel.tensorflow.record.tracing import results_of


@dataclass(eq=False)
class Request:
    """One request for the gradients of a call, in the graph of a step.

    Attributes:
        given: gradients of the outputs.
        operations: of each backward pass of this process.
        transfers: operation of each transfer with them that must be put in an order.
        returned: operations that bring gradients of the call.
    """

    given: list[Any]
    operations: dict[Pass, Any] = field(default_factory=dict)
    transfers: dict[Transfer, Any] = field(default_factory=dict)
    returned: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class Call:
    """One call of the model for one microbatch, in the graph of a step.

    Attributes:
        local: what this process executes.
        inputs: tensors that the call was given.
        results: the operation whose outputs are the results of the call.
        operations: of each forward pass of this process.
        transfers: operation of each transfer with them that must be put in an order.
        requests: for its gradients, in the order in which the body made them.
        keys: of transfers, those of the first request and of the forward passes first.
    """

    local: LocalPrograms
    inputs: list[Any]
    results: Any = None
    operations: dict[Pass, Any] = field(default_factory=dict)
    transfers: dict[Transfer, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    keys: list[dict[Transfer, Key]] = field(default_factory=list)

    def passes(self) -> Iterator[Any]:
        """Yields the operations of all passes."""
        yield from self.operations.values()
        for request in self.requests:
            yield from request.operations.values()


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
        calls: list[Call],
        differentiate: Differentiate,
    ) -> Backward:
        """Adds a call; returns what has its outputs and computes its gradients.

        Shape: inputs of (microbatch, ...); outputs are those of the traced call, on all ranks.

        Args:
            local: what this process executes.
            inputs: tensors of the present graph.
            key: of random operations, int64 of shape [2].
            anchors: variables of which gradients are asked with all others, and are zero.
            calls: of the microbatch until now, to which this one is added.
            differentiate: computes gradients of the gradients of inputs.
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
        calls.append(call)
        keys = self._keys(calls, call, 0)
        with unrecorded():
            self._run(call, call, Kind.FORWARD, values, keys, key)
            outputs = [values[output.name] for output in trace.outputs]
        pairs = [
            *zip(trace.variables, trace.variable_gradients, strict=True),
            *zip(trace.others, trace.other_gradients, strict=True),
        ]
        mine = [(variable, gradient) for variable, gradient in pairs if is_here(variable)]
        absent = [(variable, gradient) for variable, gradient in pairs if not is_here(variable)]
        for variable, _ in absent:
            accessed(variable)
        reads = [variable.read_value() for variable, _ in mine]
        # Of a process that has none of the variables that a tape watches others wait for its part.
        reads += [watched(anchor.read_value()) for anchor in anchors]

        def ask(given: list[Any], own: dict[str, Any]) -> Request:
            request = Request(given)
            keys = self._keys(calls, call, len(call.requests))
            call.requests.append(request)
            self._run(call, request, Kind.BACKWARD, own, keys, key)
            return request

        return Backward(
            call,
            values,
            ask,
            outputs,
            [*inputs, *reads],
            [gradient for _, gradient in mine],
            absent,
            len(anchors),
            differentiate,
        )

    def _keys(self, calls: Sequence[Call], call: Call, number: int) -> dict[Transfer, Key]:
        """Returns the keys of the transfers of a call for one of its requests.

        Processes may come to the calls of one tape in different orders, so that all calls get
        theirs together.
        """
        while len(call.keys) <= number:
            count = len(call.keys) + 1
            for each in calls:
                if len(each.keys) < count:
                    transfers = each.local.plan.transfers
                    each.keys.append({one: self._links.new_key(one.tensor) for one in transfers})
        return call.keys[number]

    def _run(
        self,
        call: Call,
        made: Call | Request,
        phase: Kind,
        values: dict[str, Any],
        keys: dict[Transfer, Key],
        key: Any,
    ) -> None:
        """Adds the programs of a phase, with its transfers, and notes what they are."""
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
                    made.transfers[transfer] = operation
                values[transfer.tensor.name] = received
        for transfer in local.sent:
            if transfer.phase is phase and transfer.made_in[0] is not phase:
                kept += self._send(made, transfer, values, keys)
        for program in local.programs:
            if program.one[0] is not phase:
                continue
            operands = [values[tensor.name] for tensor in program.inputs]
            # Passes have an order of their own. With resources they wait for what else uses these,
            # but not for each other in the order in which they are made here.
            read = [values[name] for name in program.read]
            changed = [values[name] for name in program.changed]
            with tf.control_dependencies(resources.before(read, changed)):
                operation = graphs.call(program.function, [key, *operands], program.executor)
            resources.after(operation, read, changed)
            kept.append(operation)
            made.operations[program.one] = operation
            for tensor, output in zip(program.outputs, operation.outputs, strict=True):
                output.set_shape(tensor.shape)
                values[tensor.name] = output
            for transfer in local.sent:
                if transfer.phase is phase and transfer.made_in == program.one:
                    kept += self._send(made, transfer, values, keys)
        graphs.keep(graph, kept)

    def _send(
        self,
        made: Call | Request,
        transfer: Transfer,
        values: dict[str, Any],
        keys: dict[Transfer, Key],
    ) -> list[Any]:
        operations = self._links.send(
            values[transfer.tensor.name], self._ranks[transfer.target], keys[transfer]
        )
        if self._links.needs_order(transfer.tensor):
            made.transfers[transfer] = operations[-1]
        return operations
