"""Who reads and who writes resources (variables, tables, generators), and in which order.

In a function TensorFlow lets operations on one resource wait for each other, in the order in which
they are made. Calls of functions count as writing what they take unless they are marked; so do
loops, even if they only read. It looks through ``Identity``, not through ``IdentityN``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils, ops

from smdistributed.modelparallel.tensorflow.compat import functions

Operation = Any
_READS = frozenset({"VarIsInitializedOp", "VarHandleOp", "ShapeN"})
_PASSES_ON = frozenset({"Identity", "IdentityN"})


def writes(operation: Operation, tensor: Any) -> bool:
    """Tells whether an operation may change a resource that it takes, loops and calls included."""
    definition = operation.node_def
    places = [n for n, each in enumerate(operation.inputs) if each is tensor]
    return any(_writes(operation.graph, definition, place) for place in places)


def _writes(graph: Any, definition: Any, place: int) -> bool:
    """Tells it of an operation by its definition, for the input of this place."""
    if definition.op in auto_control_deps_utils.RESOURCE_READ_OPS or definition.op in _READS:
        return False
    shift = 1 if definition.op in ("If", "StatelessIf", "Case", "StatelessCase") else 0
    names = functions.called(definition)
    if not names:
        return True
    return any(_function_writes(graph, name, place - shift) for name in names)


def _function_writes(graph: Any, name: str, place: int) -> bool:
    """Tells whether a function may change the resource that is its argument of this place."""
    function = graph._get_function(name)
    if function is None:
        return True
    definition = getattr(function, "cached_definition", None) or function.function_def
    if not 0 <= place < len(definition.signature.input_arg):
        return True
    known = {definition.signature.input_arg[place].name}
    for node in _in_order(definition.node_def):
        taken = [n for n, each in enumerate(node.input) if each in known]
        if not taken:
            continue
        if node.op in _PASSES_ON:
            known |= {f"{node.name}:output:{n}" for n in taken}
        elif any(_writes(graph, node, n) for n in taken):
            return True
    return False


def _in_order(nodes: Iterable[Any]) -> list[Any]:
    """Returns the nodes of a function, those that pass a resource on before the others."""
    return sorted(nodes, key=lambda node: node.op not in _PASSES_ON)


def written(operations: Iterable[Operation]) -> dict[int, Any]:
    """Returns the resource tensors, by ``id``, that TensorFlow takes some operation to write."""
    return _used(operations, auto_control_deps.ResourceType.READ_WRITE)


def read(operations: Iterable[Operation]) -> dict[int, Any]:
    """Returns the resource tensors, by ``id``, that TensorFlow takes some operation to read."""
    return _used(operations, auto_control_deps.ResourceType.READ_ONLY)


def _used(operations: Iterable[Operation], how: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for operation in operations:
        if operation.type in _PASSES_ON:
            continue
        for tensor, kind in auto_control_deps._get_resource_inputs(operation):
            if kind is how:
                found[id(tensor)] = tensor
    return found


def waits_for_more(operation: Operation) -> bool:
    """Tells whether an operation needs more than the resources that it uses."""
    return bool(operation.control_inputs) or any(
        tensor.dtype != tf.resource for tensor in operation.inputs
    )


def origin(graph: Any, tensor: Any) -> Any:
    """Returns the tensor outside of all functions that a function's placeholder stands for."""
    while hasattr(graph, "captures"):
        outside = {id(inside): each for each, inside in graph.captures}
        if id(tensor) not in outside:
            return tensor
        tensor, graph = outside[id(tensor)], graph.outer_graph
    return tensor


def before(read: Sequence[Any], changed: Sequence[Any]) -> list[Operation]:
    """Returns what to wait for before resources are used: all writes so far.

    Where they are changed, all reads so far, too.
    """
    found = []
    if read:
        found.append(tf.identity_n(list(read))[0].op)
        _mark_as_reading(found[-1], len(read))
    if changed:
        found.append(tf.identity_n(list(changed))[0].op)
    return found


def after(operation: Operation, read: Sequence[Any], changed: Sequence[Any]) -> None:
    """Makes what writes resources later wait for an operation; what reads those changed, too."""
    with tf.control_dependencies([operation]):
        if read:
            _mark_as_reading(tf.identity_n(list(read))[0].op, len(read))
        if changed:
            tf.identity_n(list(changed))


def _mark_as_reading(operation: Operation, count: int) -> None:
    name = auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR
    ops.set_int_list_attr(operation, name, list(range(count)))
