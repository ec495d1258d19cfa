"""Operations that call functions (loops, branches, calls), made anew with one argument more.

A loop hands the argument on from one turn to the next, so that its body returns it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2, types_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function

from smdistributed.modelparallel.tensorflow.compat import graphs

_LOOPS = ("While", "StatelessWhile")
#: By type of operation, the attribute with the dtypes of its arguments.
_ARGUMENTS = {
    **dict.fromkeys(_LOOPS, "T"),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), "Tin"),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), "Tin"),
}


def called(definition: Any) -> list[str]:
    """Returns the names of the functions that an operation calls, given its definition."""
    return [name for key in sorted(definition.attr) for name in _names(definition.attr[key])]


def calls_anywhere(graph: graphs.Graph, operation: graphs.Operation, kind: str) -> bool:
    """Tells whether an operation is of a type, or calls a function that has one of that type."""
    if operation.type == kind:
        return True
    seen: set[str] = set()
    names = called(operation.node_def)
    while names:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            for node in nodes_of(graph, name):
                if node.op == kind:
                    return True
                names += called(node)
    return False


def body_of_loop(definition: Any) -> str | None:
    """Returns the function that an operation calls for each turn; None if it is no loop."""
    return str(definition.attr["body"].func.name) if definition.op in _LOOPS else None


def takes_more(definition: Any) -> bool:
    """Tells whether ``call_with_more`` can make an operation anew."""
    return definition.op in _ARGUMENTS


def nodes_of(graph: graphs.Graph, name: str) -> list[Any]:
    """Returns the definitions of the operations of a function that a graph knows."""
    function = graph._get_function(name)
    return [] if function is None else list(function.cached_definition.node_def)


def graph_of(graph: graphs.Graph, name: str) -> graphs.Graph:
    """Returns a function that a graph knows as a graph of its own."""
    return atomic_function.to_func_graph(graph._get_function(name))


def own_graph(graph: graphs.Graph, name: str) -> graphs.Graph:
    """Returns the very graph of a function that a graph knows; None if it was not made here."""
    return getattr(graph._get_function(name), "graph", None)


def attributes_of(graph: graphs.Graph, name: str) -> dict[str, Any]:
    """Returns what is said of how a function is to run."""
    return dict(graph._get_function(name).cached_definition.attr)


def call_with_more(
    graph: graphs.Graph,
    operation: graphs.Operation,
    inputs: Sequence[Any],
    more: Any,
    control_inputs: Sequence[graphs.Operation],
    functions: Mapping[str, Any],
    dropped: Sequence[str],
) -> graphs.Operation:
    """Adds an operation of another graph that calls other functions, with one input more.

    Args:
        graph: where to.
        operation: what; see ``takes_more``.
        inputs: tensors of ``graph``.
        more: the last input, int64 of shape [2].
        control_inputs: operations of ``graph``.
        functions: by name of a function that the operation calls, the one of
            ``graphs.function_of`` to call instead.
        dropped: names of attributes that are left out.

    Returns:
        the operation; a loop has ``more`` among its outputs, as the last one.
    """
    for function in functions.values():
        graph._add_function_recursive(function)
    attrs = {name: value for name, value in operation.node_def.attr.items() if name not in dropped}
    attrs = {name: _renamed(value, functions) for name, value in attrs.items()}
    dtypes = attrs[_ARGUMENTS[operation.type]]
    dtypes.list.type.append(types_pb2.DT_INT64)
    outputs = [output.dtype for output in operation.outputs]
    if operation.type in _LOOPS:
        outputs.append(more.dtype)
        if attrs["output_shapes"].list.shape:
            attrs["output_shapes"].list.shape.append(more.shape.as_proto())
    return graphs.add_operation(graph, operation, [*inputs, more], outputs, control_inputs, attrs)


def _names(value: Any) -> list[str]:
    kind = value.WhichOneof("value")
    if kind == "func":
        return [value.func.name]
    return [each.name for each in value.list.func] if kind == "list" else []


def _renamed(value: Any, functions: Mapping[str, Any]) -> Any:
    """Returns a copy of an attribute that names the other functions."""
    copied = attr_value_pb2.AttrValue()
    copied.CopyFrom(value)
    kind = copied.WhichOneof("value")
    found = [copied.func] if kind == "func" else list(copied.list.func) if kind == "list" else []
    for each in found:
        if each.name in functions:
            each.name = functions[each.name].name.decode()
    return copied
