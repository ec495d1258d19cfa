"""Everything that is used of TensorFlow beyond its public API, in one place.

What is used of Keras stands in ``compat.keras``.

``self_test`` says whether the installed TensorFlow still has it; the unit tests run it for each
version that the package claims. No other module of the package imports ``tensorflow.python``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import handle_data_util, resource_variable_ops
from tensorflow.python.training.server_lib import ClusterSpec

_DERIVED = b"type.googleapis.com/tensorflow.DerivedStatus"

Graph = Any
Operation = Any
Variable = Any

not_converted = tf.autograph.experimental.do_not_convert


# Graphs


def trace(
    name: str,
    function: Callable[..., Sequence[Any]],
    specs: Sequence[Any],
    creator: Callable[..., Any],
) -> Graph:
    """Runs a function on symbolic tensors; returns the graph of its operations.

    Args:
        name: of the graph.
        function: takes one tensor a spec, returns a list of tensors.
        specs: what it is given.
        creator: makes the variables, in and outside the graph.
    """

    def body(*tensors: Any) -> Sequence[Any]:
        with tf.variable_creator_scope(creator):
            return function(*tensors)

    with tf.init_scope(), tf.variable_creator_scope(creator):
        return func_graph.func_graph_from_py_func(
            name, body, tuple(specs), {}, add_control_dependencies=True
        )


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with AutoGraph applied, as ``tf.function`` does to what it wraps.

    Errors keep their types; AutoGraph turns most into a ``StagingError``.
    """
    status = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, None)
    result: Callable[..., Any] = autograph.tf_convert(
        function, status, convert_by_default=True, user_requested=True
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return result(*args, **kwargs)
        except autograph.StagingError as error:
            raise (error.__context__ or error) from None

    return call


def leave_unconverted(package: str) -> None:
    """Makes AutoGraph leave the code of a package as it is."""
    rule = autograph_config.DoNotConvert(package)
    if not any(getattr(each, "_prefix", None) == package for each in _conversion_rules()):
        autograph_config.CONVERSION_RULES = (rule, *_conversion_rules())


def _conversion_rules() -> tuple[Any, ...]:
    return tuple(autograph_config.CONVERSION_RULES)


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
    with graph.as_default(), graph.control_dependencies(control_inputs):
        copied = graph._create_op_internal(
            operation.type,
            list(inputs),
            [output.dtype for output in operation.outputs],
            name=operation.name,
            attrs=attrs,
            op_def=operation.op_def,
            compute_device=True,
        )
    for old, new in zip(operation.outputs, copied.outputs, strict=True):
        _copy_handle_data(old, new)
    return copied


def _copy_handle_data(old: Any, new: Any) -> None:
    if old.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(old, new)


def function_of(
    graph: Graph, inputs: Sequence[Any], outputs: Sequence[Any], always: Sequence[Operation]
) -> Any:
    """Makes a function of a graph. It is not inlined, so that it runs as one.

    Args:
        graph: its operations.
        inputs: placeholders in it.
        outputs: tensors in it.
        always: operations that run even if no output needs them.
    """
    graph.inputs = list(inputs)
    graph.outputs = list(outputs)
    graph.structured_outputs = list(outputs)
    graph.control_outputs = list(always)
    name = f"__smp_{graph.name}_{ops.uid()}"
    return atomic_function.from_func_graph(name, graph, {"_noinline": True})


def call(function: Any, inputs: Sequence[Any]) -> Operation:
    """Calls a function of ``function_of`` in the present graph; returns the operation."""
    graph = ops.get_default_graph()
    options = context.context().function_call_options.as_attrs()
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


def add_control_input(operation: Operation, earlier: Operation) -> None:
    """Makes an operation wait for another one, also after both were made."""
    operation._add_control_input(earlier)


def colocated_with(operation: Operation) -> list[str]:
    """Returns the names of operations that TensorFlow keeps with this one."""
    marks = (mark.decode() for mark in operation.colocation_groups())
    return [mark[5:] for mark in marks if mark.startswith("loc:@") and mark[5:] != operation.name]


def is_stateful(operation: Operation) -> bool:
    """Tells whether an operation has effects or state besides its outputs."""
    return bool(operation._is_stateful)


# Gradients


_gradient_count = 0


def with_gradient(
    originals: Sequence[Any], gradient: Callable[..., Sequence[Any]], label: str
) -> list[Any]:
    """Returns the tensors, with a gradient of our own, for tapes and ``tf.gradients`` alike.

    Args:
        originals: tensors of the present graph.
        gradient: takes a gradient (or None) for each, returns one (or None) for each.
        label: part of the names of the operation and its gradient.
    """
    global _gradient_count
    _gradient_count += 1
    name = f"{label}{_gradient_count}"
    ops.RegisterGradient(name)(lambda operation, *gradients: gradient(*gradients))
    graph = ops.get_default_graph()
    with record.stop_recording(), graph.gradient_override_map({"IdentityN": name}):
        results = tf.identity_n(list(originals), name=label)
    record.record_operation(name, results, list(originals), gradient)
    return list(results)


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Within, no tape sees what is done."""
    manager: contextlib.AbstractContextManager[None] = record.stop_recording()
    return manager


# Variables


def variable_bytes(handle: Any) -> int:
    """Returns the size of the variable behind a handle; unknown dimensions count as 1."""
    data = handle._handle_data.shape_and_type[0]
    count: int = math.prod(max(int(dimension.size), 1) for dimension in data.shape.dim)
    return count * int(tf.as_dtype(data.dtype).size)


def empty_variable(like: Any, arguments: Mapping[str, Any]) -> Variable:
    """Returns a variable without memory, of the shape and dtype of ``like``.

    Args:
        like: a tensor of any graph.
        arguments: of the call that was to create the variable.
    """
    with tf.init_scope():
        return resource_variable_ops.UninitializedVariable(
            trainable=arguments.get("trainable", True),
            name=arguments.get("name"),
            shape=like.shape,
            dtype=like.dtype.base_dtype,
            synchronization=arguments.get("synchronization"),
            aggregation=arguments.get("aggregation"),
        )


def free(variable: Variable) -> None:
    """Gives the memory of a variable back; it has no value from now on."""
    tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)


@contextlib.contextmanager
def checked_access(check: Callable[[Variable], None]) -> Iterator[None]:
    """Within, ``check`` is called with every variable that Python code reads or writes."""
    names = ("_read_variable_op", "assign", "assign_add", "assign_sub", "sparse_read")
    kinds = (resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable)
    # Eager variables are of the second class, which has some of these methods of its own.
    saved = [
        (kind, name, vars(kind)[name]) for kind in kinds for name in names if name in vars(kind)
    ]

    def checking(original: Callable[..., Any]) -> Callable[..., Any]:
        def access(self: Variable, *args: Any, **kwargs: Any) -> Any:
            check(self)
            return original(self, *args, **kwargs)

        unconverted: Callable[..., Any] = not_converted(access)
        return unconverted

    for kind, name, original in saved:
        setattr(kind, name, checking(original))
    try:
        yield
    finally:
        for kind, name, original in saved:
            setattr(kind, name, original)


# Checkpoints


def write_checkpoint_state(directory: str, newest: str, every: Sequence[str]) -> None:
    """Writes the text file in which TensorFlow's managers note their checkpoints."""
    checkpoint_management.update_checkpoint_state_internal(
        directory, newest, all_model_checkpoint_paths=list(every), save_relative_paths=True
    )


# Processes


def join_cluster(addresses: Sequence[str], rank: int, use_nccl: bool) -> None:
    """Starts this process's server, through which TensorFlow's collectives reach the others.

    Args:
        addresses: ``host:port`` of every process.
        rank: of this one.
        use_nccl: carry tensors on GPUs with NCCL.
    """
    cluster = ClusterSpec({"smp": list(addresses)})
    eager = context.context()
    eager.configure_collective_ops(
        collective_leader="/job:smp/replica:0/task:0",
        use_nccl_communication=use_nccl,
        device_filters=[f"/job:smp/task:{rank}"],
    )
    eager.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            default_session_config=eager.config,
            job_name="smp",
            task_index=rank,
            protocol="grpc",
        )
    )


def silent_processes(ranks: Sequence[int], timeout_seconds: float) -> list[int]:
    """Returns those of the processes whose server does not answer.

    Args:
        ranks: processes to ask, after ``join_cluster``.
        timeout_seconds: how long to wait for each.
    """
    found = []
    for rank in ranks:
        try:
            context.context().check_collective_ops_peer_health(
                f"/job:smp/replica:0/task:{rank}", round(1000 * timeout_seconds)
            )
        except tf.errors.OpError:
            found.append(rank)
    return found


def is_consequence(error: Any) -> bool:
    """Tells whether TensorFlow cancelled something since another operation here had failed."""
    return _DERIVED in error.experimental_payloads


def self_test() -> None:
    """Uses everything above once.

    Raises:
        Exception: the installed TensorFlow lacks something, or it works differently.
    """
    made: list[Any] = []

    def creator(next_creator: Any, **arguments: Any) -> Any:
        with tf.Graph().as_default():
            like = tf.convert_to_tensor(arguments["initial_value"]())
        made.append(empty_variable(like, arguments))
        return made[-1]

    def body(x: Any) -> list[Any]:
        with attributes({"_smp_number": 3, "_smp_word": "a"}):
            with tf.init_scope():
                made or tf.Variable(lambda: tf.ones([2]))
            return [x * made[0]]

    graph = trace("self_test", body, [tf.TensorSpec([2], tf.float32)], creator)
    (product,) = (operation for operation in graph.get_operations() if operation.type == "Mul")
    assert attribute(product, "_smp_number") == 3
    assert attribute(product, "_smp_word") == "a"
    ((handle, inside),) = captures(graph)
    assert handle is made[0].handle
    made[0].assign([2.0, 3.0])

    copy = new_graph("copy")
    inputs = [placeholder(copy, graph.inputs[0]), placeholder(copy, inside)]
    copies = {id(graph.inputs[0]): inputs[0], id(inside): inputs[1]}
    for operation in graph.get_operations():
        if operation.type in ("ReadVariableOp", "Mul"):
            copied = copy_operation(
                copy, operation, [copies[id(t)] for t in operation.inputs], [], ("_smp_number",)
            )
            copies[id(operation.outputs[0])] = copied.outputs[0]
    assert attribute(copied, "_smp_number") is None
    function = function_of(copy, inputs, copied.outputs, [copied])

    def run(x: Any) -> Any:
        variable = made[0]
        with tf.GradientTape() as tape:
            read = variable.read_value()
            with unrecorded():
                graph = ops.get_default_graph()
                operation = call(function, [x, capture(graph, handle)])
                keep(graph, [operation])
            result, *_ = with_gradient(
                [operation.outputs[0], read], lambda dy, _: [None, 5.0 * dy], "SmpSelfTest"
            )
        return result, tape.gradient(result, variable)

    product, gradient = tf.function(run, autograph=False)(tf.constant([1.0, 1.0]))
    assert product.numpy().tolist() == [2.0, 3.0]
    assert gradient.numpy().tolist() == [5.0, 5.0]
    free(made[0])
