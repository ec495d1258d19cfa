"""Gradients of a step's ``backward`` that its forward pass computes with.

What a script only stores or returns of a gradient is computed behind the backward pass, which has
it for nothing (``planning.late_values``). What goes on into a module, or into another loss, cannot
wait: the gradient is asked for then, as by ``torch.autograd.grad``, and what was computed from
gradients before goes where the script computed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.taps import Tap


@dataclass(frozen=True)
class Differentiated:
    """What the gradient of an activation is a gradient of.

    Attributes:
        roots: the losses, of which those count that the activation leads to.
        starts: the gradients of these; None: the step learns them when it runs.
    """

    roots: Sequence[Value]
    starts: Sequence[Value | None]


class EarlyGradients:
    """Brings gradients forward, in one graph.

    Args:
        graph: that is written.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._of: dict[Node, Differentiated] = {}
        #: Whose backward pass runs code of the user's.
        self.with_code: set[Node] = set()

    def note(self, node: Node, of: Differentiated) -> None:
        """Takes note of what the gradient of a node is a gradient of."""
        self._of[node] = of

    def bring_forward(self, wanted: Iterable[Value], name: str) -> None:
        """Has what was computed from gradients so far computed where the script does so.

        All of it, as one may change in place what another one reads.

        Args:
            wanted: late values that the forward pass needs now.
            name: of what does, for messages.

        Raises:
            UnsupportedError: the gradient cannot be asked for.
        """
        graph = self._graph
        if any(each.final is not each.given for each in graph.gradients):
            raise computes_on(name, "a hook changes a gradient on its way")
        used = {value for node in graph.late if not _arrives(node) for value in node.inputs}
        used.update(wanted)
        moved = [
            node for node in graph.late if not (_arrives(node) and used.isdisjoint(node.outputs))
        ]
        for node in moved:
            if _arrives(node):
                self._ask(node, name)
            elif any(value.is_changed and not value.node.late for value in node.inputs):
                raise computes_on(name, "it was computed of a tensor that is changed in place")
        brought = set(moved)
        graph.late = [node for node in graph.late if node not in brought]
        graph.gradients = [each for each in graph.gradients if each.given.node not in brought]
        for node in moved:
            node.late, node.index = False, len(graph.nodes)
            graph.add(node)

    def settle(self, returned: Collection[Value]) -> None:
        """Sees to gradients of several losses, of which a pipeline has one backward pass.

        Args:
            returned: what the step gives.
        """
        graph = self._graph
        several = {each.given for each in graph.gradients if self._num_roots(each.of) > 1}
        several = {value for value in several if value.node in self._of}
        needed = _late_sources(returned)
        if not several.isdisjoint(needed):
            self.bring_forward([value for value in returned if value.node.late], "the end")
        if not any(each.final is not each.given for each in graph.gradients):
            graph.gradients = [
                each
                for each in graph.gradients
                if each.given not in several or each.given in needed
            ]

    def _num_roots(self, activation: Value) -> int:
        return sum(activation in reached_from([root]) for root in self._graph.roots)

    def _ask(self, node: Node, name: str) -> None:
        """Turns the gradient that a backward pass gives into one that is asked for.

        Raises:
            UnsupportedError: it would not be the same.
        """
        (activation,) = node.args
        of = self._of[node]
        pairs = [
            (root, start)
            for root, start in zip(of.roots, of.starts, strict=True)
            if activation in reached_from([root])
        ]
        if any(start is None for _, start in pairs):
            raise computes_on(name, "losses are scaled by what only the step knows (fp16)")
        if not pairs:
            raise computes_on(name, "no loss leads to it by what is seen")
        between = reached_from([root for root, _ in pairs])
        if any(value.node in self.with_code for value in between):
            raise computes_on(name, "a module on its way has code of its own in its backward pass")
        node.kind, node.target = NodeKind.CALL, torch.autograd.grad
        node.args = [root for root, _ in pairs], [activation], [start for _, start in pairs]
        # The backward pass of the step is yet to come.
        node.kwargs = {"retain_graph": True}
        (gradient,) = node.outputs
        gradient.source = (("item", 0),)


def reached_from(roots: Iterable[Value]) -> set[Value]:
    """Returns the values that the gradients of some come to; what is in a leaf is part of its."""
    pending, reached = list(roots), set[Value]()
    while pending:
        value = pending.pop()
        if value not in reached and value.requires_grad:
            reached.add(value)
            node = value.node
            pending += [*node.inputs, *node.changed_views]
            pending += [each for each in node.outputs if isinstance(each.source, Tap)]
    return reached


def _arrives(node: Node) -> bool:
    """Whether a node is a gradient that a backward pass gives."""
    return node.kind is NodeKind.GRADIENT


def _late_sources(values: Iterable[Value]) -> set[Value]:
    """Returns the late values that some are made of, these included."""
    pending, found = list(values), set[Value]()
    while pending:
        value = pending.pop()
        if value.node.late and value not in found:
            found.add(value)
            pending += [*value.node.inputs, *_changed(value.node)]
    return found


def _changed(node: Node) -> Iterator[Value]:
    return (each.source for each in node.outputs if isinstance(each.source, Value))


def computes_on(name: str, reason: str = "") -> UnsupportedError:
    """Returns the error of what needs gradients of a step to compute on in it.

    Args:
        name: of what does.
        reason: why they cannot be asked for.
    """
    because = f" It cannot be computed before: {reason}." if reason else ""
    return UnsupportedError(
        f"{name} is to compute with the gradient of an activation, or of an input, of the same "
        f"pipelined step: the backward pass runs when the Python of the step has.{because} Ask "
        "for it by torch.autograd.grad(loss, tensor), or return the gradient from the step "
        "function, and go on in another one."
    )
