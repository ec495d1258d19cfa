"""What operations of a graph compute, by their types and the shapes of what they take and give.

Of a loop the operations of its body count as often as it turns at most, of a branch those of the
side that has more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import functions
from smdistributed.modelparallel.tensorflow.record.sizes import num_bytes, num_elements


@dataclass(frozen=True)
class Work:
    """What operations do.

    Attributes:
        of_weights: floating-point operations of products with weights.
        products: those of all products.
        half_products: of all, those in half precision.
        moved_bytes: that all else reads and writes.
        kernels: operations that compute something.
    """

    of_weights: float = 0.0
    products: float = 0.0
    half_products: float = 0.0
    moved_bytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: Work) -> Work:
        names = [each.name for each in dataclasses.fields(self)]
        return Work(*(getattr(self, name) + getattr(other, name) for name in names))

    def times(self, factor: float) -> Work:
        """Returns that of so many turns."""
        names = [each.name for each in dataclasses.fields(self)]
        return Work(*(factor * getattr(self, name) for name in names))


#: What has the memory of what it is given, or of a variable.
VIEWS = frozenset(
    {
        "CheckNumerics",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "PreventGradient",
        "ReadVariableOp",
        "Reshape",
        "Squeeze",
        "StopGradient",
    }
)
#: What reads as much as it gives, of something that may be larger.
_READS_A_PART = frozenset(
    {"Gather", "GatherNd", "GatherV2", "ResourceGather", "Slice", "Split", "SplitV", "StridedSlice"}
)
#: The shapes of tensors, and what is computed of them: smaller than any batch.
_LARGEST_OF_SHAPES = 64
#: What changes a variable, and how often the bytes of a value are read or written for that.
_ASSIGNS = {"AssignVariableOp": 2, "AssignAddVariableOp": 3, "AssignSubVariableOp": 3}
_HALVES = (tf.float16, tf.bfloat16)
_LOOPS = ("While", "StatelessWhile")
#: What gives the value of a variable in another type or form.
_PASS_ON = frozenset({*VIEWS, "Cast", "Transpose"})
#: What puts a value of a turn into a list, for the gradient of a loop.
_PUSH = "TensorListPushBack"


def work_of(graph: Any, op: Any, of_variables: Collection[Any] = ()) -> Work:
    """Returns what an operation does.

    Args:
        graph: that has it, and knows the functions that it calls.
        op: the operation.
        of_variables: operations that give values of variables.
    """
    called = functions.called(op.node_def)
    if called:
        return _of_functions(graph, op, called)
    if op.type in _ASSIGNS:
        return Work(moved_bytes=float(_ASSIGNS[op.type] * num_bytes(op.inputs[1])), kernels=1.0)
    if op.type in VIEWS or not op.outputs:
        return Work()
    if op.type in _PRODUCTS:
        count = float(_PRODUCTS[op.type](op))
        has_weights = any(tensor.op in of_variables for tensor in op.inputs)
        is_half = op.outputs[0].dtype in _HALVES
        return Work(count * has_weights, count, count * is_half, kernels=1.0)
    given = sum(map(num_bytes, op.outputs))
    if given <= _LARGEST_OF_SHAPES and all(num_bytes(x) <= _LARGEST_OF_SHAPES for x in op.inputs):
        return Work()
    read = given if op.type in _READS_A_PART else sum(map(num_bytes, op.inputs))
    return Work(moved_bytes=float(given + read), kernels=1.0)


def values_of_variables(ops: Collection[Any]) -> set[Any]:
    """Returns the operations that give values of variables, in any type and form."""
    found: set[Any] = set()
    for op in ops:
        passes_on = op.type in _PASS_ON and op.inputs[0].op in found
        if op.type == "ReadVariableOp" or passes_on:
            found.add(op)
    return found


def turns_of(op: Any) -> int:
    """Returns how often a loop turns at most, as far as its graph says: 1 where it does not.

    TensorFlow's loops have that number as their second input, -1 for none. Else it is taken for
    the length of the longest list that the loop goes through.
    """
    if op.type not in _LOOPS or len(op.inputs) < 2:
        return 1
    most = _number(op.inputs[1])
    if most > 0:
        return most
    lists = [each.op for each in op.inputs if each.dtype == tf.variant]
    lengths = [_number(one.inputs[1]) for one in lists if one.type == "TensorListReserve"]
    lengths += [_length(x.inputs[0].shape, 0) for x in lists if x.type == "TensorListFromTensor"]
    return max([1, *lengths])


def _number(tensor: Any) -> int:
    """Returns the number that a tensor is known to be; 0 where it is not known."""
    found = tf.get_static_value(tensor)
    return int(found) if found is not None and found.shape == () else 0


def kept_by_turns(graph: Any, op: Any) -> int:
    """Returns the bytes that a loop puts into lists for its gradient."""
    body = functions.body_of_loop(op.node_def)
    if body is None:
        return 0
    pushed = [each for each in _graph(graph, body).get_operations() if each.type == _PUSH]
    return turns_of(op) * sum(num_bytes(each.inputs[1]) for each in pushed)


def _of_functions(graph: Any, op: Any, called: Collection[str]) -> Work:
    body = functions.body_of_loop(op.node_def)
    if body is not None:
        return _of_graph(_graph(graph, body)).times(turns_of(op))
    sides = [_of_graph(_graph(graph, name)) for name in called]
    return max(sides, key=lambda each: (each.products, each.moved_bytes))


def _of_graph(graph: Any) -> Work:
    ops = graph.get_operations()
    weights = values_of_variables(ops)
    return sum((work_of(graph, op, weights) for op in ops), Work())


def _graph(graph: Any, name: str) -> Any:
    return functions.own_graph(graph, name) or functions.graph_of(graph, name)


def _of_matrix(adjoint: str, op: Any) -> int:
    shape = op.inputs[0].shape
    place = -2 if op.get_attr(adjoint) else -1
    return 2 * num_elements(op.outputs[0]) * _length(shape, place)


def _of_convolution(op: Any) -> int:
    kernel = op.inputs[1]
    return 2 * num_elements(op.outputs[0]) * num_elements(kernel) // _length(kernel.shape, -1)


def _of_depthwise(op: Any) -> int:
    shape = op.inputs[1].shape
    return 2 * num_elements(op.outputs[0]) * _length(shape, 0) * _length(shape, 1)


def _of_transposed(op: Any) -> int:
    kernel = op.inputs[1]
    return 2 * num_elements(op.inputs[2]) * num_elements(kernel) // _length(kernel.shape, -1)


def _of_einsum(op: Any) -> int:
    """Counts a product for each combination of the letters."""
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    lengths: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        if tensor.shape.rank is None:
            return 0
        before, _, after = term.partition("...")
        lengths |= {letter: _length(tensor.shape, at) for at, letter in enumerate(before)}
        last = len(after)
        lengths |= {letter: _length(tensor.shape, at - last) for at, letter in enumerate(after)}
        if "..." in term:
            dims = range(len(before), tensor.shape.rank - last)
            rest = math.prod(_length(tensor.shape, at) for at in dims)
            lengths["..."] = max(rest, lengths.get("...", 1))
    return 2 * math.prod(lengths.values())


def _length(shape: Any, place: int) -> int:
    if shape.rank is None:
        return 1
    return int(shape[place] or 1)


_PRODUCTS: Mapping[str, Callable[[Any], int]] = {
    "BatchMatMul": functools.partial(_of_matrix, "adj_x"),
    "BatchMatMulV2": functools.partial(_of_matrix, "adj_x"),
    "BatchMatMulV3": functools.partial(_of_matrix, "adj_x"),
    "Conv2D": _of_convolution,
    "Conv2DBackpropInput": _of_transposed,
    "Conv3D": _of_convolution,
    "Conv3DBackpropInputV2": _of_transposed,
    "DepthwiseConv2dNative": _of_depthwise,
    "Einsum": _of_einsum,
    "MatMul": functools.partial(_of_matrix, "transpose_a"),
}
