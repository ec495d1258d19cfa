"""What a step asks for when it asks for gradients in its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.planning.products import DIFFERENTIATING, product
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.tensors.functions import SWITCHING_GRADIENTS

_SIGNATURE = inspect.signature(torch.autograd.grad)


class Asked(NamedTuple):
    """What a call differentiates.

    Attributes:
        outputs: what.
        inputs: what by.
        starts: the gradients of the outputs; None for ones.
        creates_graph: the gradients can be differentiated.
        is_batched: the starts are several.
        fills: inputs to which nothing flows have gradients of zeros.
    """

    outputs: Sequence[Value]
    inputs: Sequence[Value]
    starts: Sequence[Value | None]
    creates_graph: bool
    is_batched: bool
    fills: bool

    @classmethod
    def by(cls, node: Node) -> Asked:
        """Returns what a node differentiates."""
        if node.target is product:
            outputs, inputs, starts, _, creates_graph = node.args
            return cls(outputs, inputs, starts, creates_graph, is_batched=False, fills=True)
        given = _SIGNATURE.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        named = given.arguments
        outputs = _listed(named["outputs"])
        starts = named["grad_outputs"]
        return cls(
            outputs,
            _listed(named["inputs"]),
            [None] * len(outputs) if starts is None else _listed(starts),
            bool(named["create_graph"]),
            bool(named["is_grads_batched"]),
            bool(named["materialize_grads"]),
        )


def _listed(obj: Any) -> Sequence[Any]:
    return obj if isinstance(obj, tuple | list) else [obj]


def differentiates(node: Node) -> bool:
    """Whether a node computes gradients in the forward pass."""
    return node.target in DIFFERENTIATING


def has_several(node: Node) -> bool:
    """Whether one result of a node may be computed from another one."""
    return len(node.outputs) > 1 and node.target not in SWITCHING_GRADIENTS


def reads_itself(node: Node, values: Iterable[Value]) -> bool:
    """Whether a module that stays whole has one of these parameters itself."""
    if node.kind is not NodeKind.LEAF:
        return False
    parameters = set(map(id, node.target.parameters()))
    return any(
        value.node.kind is NodeKind.ATTRIBUTE and id(getattr(*value.node.target)) in parameters
        for value in values
    )
