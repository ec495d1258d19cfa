"""What the body of a step function does besides calling models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import functions, graphs, resources
from smdistributed.modelparallel.tensorflow.execute.replay import Call
from smdistributed.modelparallel.tensorflow.gradients.combining import PARTIAL, refusal
from smdistributed.modelparallel.tensorflow.parameters.shares import Family, Form, share_of
from smdistributed.modelparallel.tensorflow.parameters.variables import path_of


class Body:
    """The operations of a body in the present graph, for all microbatches.

    Args:
        name: of the step function.
        calls: of models, by microbatch.
        begin: number of operations in the graph before the step.

    Attributes:
        operations: those that the body made itself.
    """

    def __init__(self, name: str, calls: Sequence[Sequence[Call]], begin: int) -> None:
        self._name = name
        self._graph = tf.compat.v1.get_default_graph()
        self._calls = [call for microbatch in calls for call in microbatch]
        passes = {op for call in self._calls for op in call.passes()}
        made = self._graph.get_operations()[begin:]
        self.operations = [op for op in made if op not in passes]

    def meets_models(self) -> bool:
        """Tells whether it writes what calls of models use, or reads what they change.

        Each microbatch is to find what the one before it left then. A read that waits for nothing
        but the variable fits any order.
        """
        plans = {id(call.local.plan): call.local.plan for call in self._calls}.values()
        captured = (each for plan in plans for each in plan.trace.captured.values())
        used = {id(each) for each in captured if each.dtype == tf.resource}
        changed = {
            id(plan.trace.captured[name])
            for plan in plans
            for resources_of_pass in plan.resources.values()
            for name, is_changed in resources_of_pass.items()
            if is_changed
        }
        if self._uses(resources.written(self.operations), used):
            return True
        waiting = [op for op in self.operations if resources.waits_for_more(op)]
        return bool(changed) and self._uses(resources.read(waiting), changed)

    def fewest_gradients(self) -> int | None:
        """Returns of how many variables gradients were asked for together, at least."""
        return min((len(each.members()) for each in self._families), default=None)

    def note_uneven(self) -> None:
        """Notes that other processes cannot see when gradients of several are put together."""
        for each in self._families:
            each.is_even = False

    @property
    def _families(self) -> list[Family]:
        return getattr(self._graph, "_smp_families", [])

    def refuse_kept(self) -> None:
        """Raises if it uses what a call of a model computed, but did not return.

        Raises:
            UnsupportedError: it does.
        """
        traced = {call.local.plan.trace.graph for call in self._calls}
        for outside, _ in graphs.captures(self._graph):
            around = graphs.enclosing(getattr(outside, "graph", None), None)
            if not traced.isdisjoint(around):
                raise UnsupportedError(
                    "a step function has of a call of the model what call returns; "
                    f"{self._name} uses {outside.name}, which call kept elsewhere, such as in an "
                    "attribute: return it as well, or give a loss to add_loss."
                )

    def partial_result(self, results: Any) -> str | None:
        """Returns why a result, computed from variables that this process has, cannot be returned.

        Others have other ones, and would return another loss. What is computed from gradients is
        not looked at: gradients are of own variables, whatever the body does with them. A process
        without variables finds nothing, so that the answers of all count.

        Args:
            results: of the body.
        """
        spread = {
            id(variable.handle): variable
            for call in self._calls
            for variable in call.local.plan.trace.variables
        }
        for result in tf.nest.flatten(results):
            share = share_of(result)
            if share is not None and share.form in (*PARTIAL, Form.SOME):
                return str(refusal([share]))
            # What was made eagerly, outside, comes from nothing here; slices are of gradients.
            is_made_here = isinstance(result, tf.Tensor) and hasattr(result, "op")
            if not is_made_here or not result.dtype.is_floating:
                continue
            read, is_of_results, is_of_gradients = self._origins(result, spread)
            if read and not is_of_gradients and (is_of_results or result.shape.rank == 0):
                return (
                    "what a step function returns must be the same on all processes of a "
                    f"pipeline; a result of {self._name} is computed from variable "
                    f"{path_of(read[0])}, and others that this process holds, each process from "
                    "its own: let the model's call add such a loss (kernel_regularizer, add_loss), "
                    "whose sum is that of model.losses."
                )
        return None

    def _origins(self, result: Any, spread: dict[int, Any]) -> tuple[list[Any], bool, bool]:
        """Returns what a result comes from.

        Returns:
            variables that the body reads for it, of those given by ``id`` of their handles; whether
            it comes from results of calls; whether from gradients of calls.
        """
        ends = {call.results for call in self._calls}
        # Loops and branches with calls in them take what these read.
        has_nested = any(end.graph is not self._graph for end in ends)
        requests = [request for call in self._calls for request in call.requests]
        returned = {op for request in requests for op in request.returned}
        read: list[Any] = []
        seen: set[Any] = set()
        stack = [result]
        while stack:
            tensor = stack.pop()
            op = tensor.op
            inputs = list(op.inputs)
            if op.type == "IdentityN" and op not in ends:
                # What a custom gradient is of goes through one, with the variables that it reads.
                inputs = [op.inputs[tensor.value_index]]
            elif op in seen:
                continue
            seen.add(op)
            share = share_of(tensor)
            is_whole = share is not None and share.form is Form.WHOLE
            if is_whole or op in ends or op in returned:
                continue
            around = has_nested and bool(functions.called(op.node_def))
            for each in inputs:
                if each.dtype != tf.resource:
                    stack.append(each)
                elif not around:
                    outside = id(resources.origin(self._graph, each))
                    read += [spread[outside]] if outside in spread else []
        return read, bool(seen & ends), bool(seen & returned)

    def _uses(self, found: dict[int, Any], handles: set[int]) -> bool:
        """Tells whether one of the resource tensors is one of these outside of all functions."""
        return any(id(resources.origin(self._graph, each)) in handles for each in found.values())
