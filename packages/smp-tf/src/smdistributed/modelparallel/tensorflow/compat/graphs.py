"""Graphs of TensorFlow, their operations, and functions made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import control_flow_v2_func_graphs, handle_data_util

Graph = Any


Operation = Any


def trace(
    name: str,
    function: Callable[..., Sequence[Any]],
    specs: Sequence[Any],
    creator: Callable[..., Any],
) -> Graph:
    """Runs a function on symbolic tensors; returns the graph of its operations.

    To be called eagerly.

    Args:
        name: of the graph.
        function: takes one tensor a spec, returns a list of tensors.
        specs: what it is given.
        creator: makes the variables, in and outside the graph.
    """

    def body(*tensors: Any) -> Sequence[Any]:
        with tf.variable_creator_scope(creator):
            return function(*tensors)

    with tf.variable_creator_scope(creator):
        return func_graph.func_graph_from_py_func(
            name, body, tuple(specs), {}, add_control_dependencies=True
        )


@contextlib.contextmanager
def attributes(values: Mapping[str, int | str]) -> Iterator[None]:
    """Within, every operation made in the present graph gets these attributes."""
    protos = {
        name: attr_value_pb2.AttrValue(i=value)
        if isinstance(value, int)
        else attr_value_pb2.AttrValue(s=value.encode())
        for name, value in values.items()
    }
    with ops.get_default_graph()._attr_scope(protos):
        yield


def attribute(operation: Operation, name: str) -> Any:
    """Returns an attribute of an operation as ``attributes`` set it, or None."""
    proto = operation.node_def.attr.get(name)
    if proto is None:
        return None
    return proto.s.decode() if proto.WhichOneof("value") == "s" else proto.i


def is_control_flow(graph: Graph) -> bool:
    """Tells whether a graph is the body of a loop, or a branch."""
    kinds = (
        control_flow_v2_func_graphs.WhileBodyFuncGraph,
        control_flow_v2_func_graphs.WhileCondFuncGraph,
        control_flow_v2_func_graphs.CondBranchFuncGraph,
    )
    return isinstance(graph, kinds)


def enclosing(graph: Graph, outermost: Graph) -> list[Graph]:
    """Returns a graph and those around it, inside of the outermost one."""
    found = []
    while graph is not outermost and hasattr(graph, "outer_graph"):
        found.append(graph)
        graph = graph.outer_graph
    return found


def captures(graph: Graph) -> list[tuple[Any, Any]]:
    """Returns what a traced graph takes from outside: (tensor outside, placeholder inside)."""
    return list(graph.captures)


def take_functions(graph: Graph, source: Graph) -> None:
    """Makes the functions that a graph's operations call known to another graph."""
    for function in source._functions.values():
        graph._add_function_recursive(function)


def new_graph(name: str) -> Graph:
    """Returns an empty graph that can become a function."""
    return func_graph.FuncGraph(name)


def placeholder(graph: Graph, like: Any) -> Any:
    """Adds a placeholder like a tensor of another graph."""
    with graph.as_default():
        tensor = tf.compat.v1.placeholder(like.dtype, like.shape)
    _copy_handle_data(like, tensor)
    return tensor


def copy_operation(
    graph: Graph,
    operation: Operation,
    inputs: Sequence[Any],
    control_inputs: Sequence[Operation],
    dropped: Sequence[str],
) -> Operation:
    """Adds an operation of another graph to this one, on other inputs.

    Args:
        graph: where to.
        operation: what.
        inputs: tensors of ``graph``.
        control_inputs: operations of ``graph``.
        dropped: names of attributes that are left out.
    """
    attrs = {name: value for name, value in operation.node_def.attr.items() if name not in dropped}
    dtypes = [output.dtype for output in operation.outputs]
    return add_operation(graph, operation, inputs, dtypes, control_inputs, attrs)


def add_operation(
    graph: Graph,
    like: Operation,
    inputs: Sequence[Any],
    dtypes: Sequence[Any],
    control_inputs: Sequence[Operation],
    attrs: Mapping[str, Any],
) -> Operation:
    """Adds an operation of the type and name of one of another graph.

    Args:
        graph: where to.
        like: an operation with these outputs, or with the first of them.
        inputs: tensors of ``graph``.
        dtypes: of its outputs.
        control_inputs: operations of ``graph``.
        attrs: its attributes.
    """
    with graph.as_default(), graph.control_dependencies(control_inputs):
        made = graph._create_op_internal(
            like.type,
            list(inputs),
            list(dtypes),
            name=like.name,
            attrs=attrs,
            op_def=like.op_def,
            compute_device=True,
        )
    for old, new in zip(like.outputs, made.outputs, strict=False):
        _copy_handle_data(old, new)
    return made


def _copy_handle_data(old: Any, new: Any) -> None:
    if old.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(old, new)


def function_of(
    graph: Graph,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    always: Sequence[Operation],
    attrs: Mapping[str, Any] | None = None,
) -> Any:
    """Makes a function of a graph. It is not inlined, so that it runs as one.

    Args:
        graph: its operations.
        inputs: placeholders in it.
        outputs: tensors in it.
        always: operations that run even if no output needs them.
        attrs: of the function, in the place of what keeps it from being inlined.
    """
    graph.inputs = list(inputs)
    graph.outputs = list(outputs)
    graph.structured_outputs = list(outputs)
    graph.control_outputs = list(always)
    name = f"__smp_{graph.name}_{ops.uid()}"
    how = {"_noinline": True} if attrs is None else dict(attrs)
    return atomic_function.from_func_graph(name, graph, how)


def call(function: Any, inputs: Sequence[Any], executor: str) -> Operation:
    """Calls a function of ``function_of`` in the present graph; returns the operation.

    Args:
        function: what is called.
        inputs: tensors of the graph.
        executor: what runs it, see ``executors``.
    """
    graph = ops.get_default_graph()
    options = {
        **context.context().function_call_options.as_attrs(),
        "executor_type": executor,
    }
    atomic_function.make_call_op_in_graph(function, list(inputs), options)
    return graph.get_operations()[-1]


def capture(graph: Graph, tensor: Any) -> Any:
    """Returns a tensor of an enclosing scope as one of this graph."""
    return graph.capture(tensor)


def keep(graph: Graph, operations: Sequence[Operation]) -> None:
    """Makes a graph under construction run operations that no output of it needs.

    TensorFlow puts them in no order, as it does others with effects.
    """
    manager = graph.experimental_acd_manager
    if manager is None:
        graph.control_outputs.extend(operations)
        return
    for operation in operations:
        manager.run_independently(operation)


def set_number(operation: Operation, name: str, value: int) -> None:
    """Changes an attribute of an operation of a graph under construction."""
    operation._set_attr(name, attr_value_pb2.AttrValue(i=value))


def add_control_input(operation: Operation, earlier: Operation) -> None:
    """Makes an operation wait for another one, also after both were made."""
    operation._add_control_input(earlier)


def colocated_with(operation: Operation) -> list[str]:
    """Returns the names of operations that TensorFlow keeps with this one."""
    marks = (mark.decode() for mark in operation.colocation_groups())
    return [mark[5:] for mark in marks if mark.startswith("loc:@") and mark[5:] != operation.name]


def has_custom_gradient(operation: Operation) -> bool:
    """Tells whether an operation stands for a function with a gradient of its own."""
    return operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr


def is_stateful(operation: Operation) -> bool:
    """Tells whether an operation has effects or state besides its outputs."""
    return bool(operation._is_stateful)
