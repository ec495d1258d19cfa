"""What the body of a step function does besides calling models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import graphs, resources
from smdistributed.modelparallel.tensorflow.execute.replay import Call


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

    def _uses(self, found: dict[int, Any], handles: set[int]) -> bool:
        """Tells whether one of the resource tensors is one of these outside of all functions."""
        return any(id(resources.origin(self._graph, each)) in handles for each in found.values())
