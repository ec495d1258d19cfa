"""Every operation that Python asks TensorFlow for, eagerly or for a graph, as it is made.

TensorFlow's own callbacks (``op_callbacks``) cannot give an eager operation another result.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import execute, imperative_grad
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import op_def_library, ops
from tensorflow.python.ops import gradients_util, math_ops

from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

#: Takes the type of an operation, its arguments (tensors, lists of them, and others) and results;
#: returns the results, or others in their place.
Made = Callable[[str, Sequence[Any], Sequence[Any]], Sequence[Any]]
#: Takes the graph of a function, the tensors that it was called with, and its results.
Called = Callable[[Any, Sequence[Any], Sequence[Any]], None]
#: Takes what is differentiated, by what, and the gradients.
Differentiated = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], None]
#: Takes what is looked at: an eager tensor whose numbers Python asks for, or a graph.
Read = Callable[[Any], None]

_UNNOTED = "_smp_unnoted"
_STANDING = "_smp_stands_for"
_is_unnoted: ContextVar[bool] = ContextVar("is_unnoted", default=False)


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Within, operations are made as if nobody looked."""
    token = _is_unnoted.set(True)
    try:
        yield
    finally:
        _is_unnoted.reset(token)


def stands_for(result: Any, own: Any) -> None:
    """Notes what takes the place of an operation's own result, with a gradient of its own."""
    setattr(result, _STANDING, own)


def is_unnoted(operation: Any) -> bool:
    """Tells whether an operation of a graph was made while nobody looked."""
    return getattr(operation, _UNNOTED, False)


@contextlib.contextmanager
def operations_noted(
    eagerly: Made,
    in_graph: Made,
    before: Read,
    called: Called,
    differentiated: Differentiated,
    read: Read,
    nothing: Callable[[], None],
) -> Iterator[None]:
    """Within, functions of ours see what is made, called and read, in the whole process.

    Args:
        eagerly: sees eager operations.
        in_graph: sees those of graphs.
        before: sees the graph of a function that is to be called.
        called: sees calls of functions, also in graphs.
        differentiated: sees requests for gradients, whose operations nobody sees.
        read: sees tensors of which Python asks the numbers.
        nothing: is called where an empty list is to be added up, which is an error of TensorFlow.
    """

    def fast(original: Any) -> Any:
        def run(context: Any, kind: str, name: Any, *args: Any) -> Any:
            result = original(context, kind, name, *args)
            return result if _is_unnoted.get() else _seen(eagerly, kind, args, result)

        return run

    def slow(original: Any) -> Any:
        def run(kind: Any, num_outputs: int, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(kind, num_outputs, inputs, *args, **kwargs)
            if _is_unnoted.get() or not isinstance(kind, bytes):  # the name of a function
                return result
            return _seen(eagerly, kind.decode(), (list(inputs),), result)

        return run

    def adding(original: Any) -> Any:
        def run(kind: str, *args: Any, **kwargs: Any) -> Any:
            structure, is_stateful, operation, outputs = original(kind, *args, **kwargs)
            if _is_unnoted.get():
                setattr(operation, _UNNOTED, True)
            else:
                outputs = _seen(in_graph, kind, operation.inputs, outputs)
            return structure, is_stateful, operation, outputs

        return run

    def calling(original: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            if _is_unnoted.get():
                return original(self, *args)
            graph = self._cached_graph  # None where it would have to be made of a definition
            if graph is None:
                return original(self, *args)
            before(graph)
            results = original(self, *args)
            called(graph, args, results or ())
            return results

        return run

    def recording(original: Any) -> Any:
        def run(kind: str, inputs: Any, attrs: Any, results: Any) -> None:
            known = getattr(results[0], "__dict__", {}) if results else {}
            if _STANDING in known:
                results = [known[_STANDING], *results[1:]]
            original(kind, inputs, attrs, results)

        return run

    def differentiating(*names: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            place = inspect.signature(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                if _is_unnoted.get():
                    return original(*args, **kwargs)
                given = place.bind(*args, **kwargs).arguments
                of, by = (_listed(given[name]) for name in names)
                with unnoted():
                    results = original(*args, **kwargs)
                    differentiated(of, by, results)
                return results

            return run

        return make

    def adding_up(original: Any) -> Any:
        """Returns ``tf.add_n`` such that the sum of one tensor is an operation, too."""

        def add_n(inputs: Any, name: Any = None) -> Any:
            if _is_unnoted.get():
                return original(inputs, name)
            inputs = list(inputs)
            if not inputs:
                nothing()
            result = original(inputs, name)
            if len(inputs) != 1:
                return result
            result = tf.identity(result)
            made = eagerly if isinstance(result, ops.EagerTensor) else in_graph
            return _seen(made, "AddN", inputs, result)

        return add_n

    def reading(original: Any) -> Any:
        def run(self: Any) -> Any:
            if not _is_unnoted.get():
                read(self)
            return original(self)

        return run

    with replaced(
        [
            Replacement(pywrap_tfe, "TFE_Py_FastPathExecute", fast),
            Replacement(execute, "execute", slow),
            Replacement(execute, "record_gradient", recording),
            Replacement(op_def_library, "_apply_op_helper", adding),
            Replacement(atomic_function.AtomicFunction, "call_flat", calling),
            Replacement(imperative_grad, "imperative_grad", differentiating("target", "sources")),
            Replacement(gradients_util, "_GradientsHelper", differentiating("ys", "xs")),
            Replacement(ops._EagerTensorBase, "_numpy", reading),
            *(Replacement(owner, "add_n", adding_up) for owner in (tf, tf.math, math_ops)),
        ]
    ):
        yield


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _seen(made: Made, kind: str, args: Sequence[Any], result: Any) -> Any:
    """Returns what takes the place of the result of an operation: a tensor, some, or nothing."""
    if isinstance(result, (list, tuple)):
        return made(kind, args, result)
    return made(kind, args, (result,))[0]
