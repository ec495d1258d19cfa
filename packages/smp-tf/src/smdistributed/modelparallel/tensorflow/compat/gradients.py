"""Gradients of our own, and what tapes see."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, imperative_grad, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util, resource_variable_ops
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_for

from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

#: The gradient that stands in graphs for all of ours. TensorFlow never forgets what is registered.
_NAME = "SmpGradient"


def with_gradient(
    originals: Sequence[Any], gradient: Callable[..., Sequence[Any]], label: str
) -> list[Any]:
    """Returns the tensors, with a gradient of our own, for tapes and ``tf.gradients`` alike.

    Args:
        originals: tensors of the present graph, or eager ones, which tapes alone differentiate.
        gradient: takes a gradient (or None) for each, returns one (or None) for each. It lives as
            long as the graph.
        label: the name of the operation.
    """
    graph = ops.get_default_graph()
    with record.stop_recording(), graph.gradient_override_map({"IdentityN": _NAME}):
        results = tf.identity_n(list(originals), name=label)
    if not tf.executing_eagerly():
        if not hasattr(graph, "_smp_gradients"):
            graph._smp_gradients = {}
        graph._smp_gradients[results[0].op.name] = gradient
    record.record_operation(label, results, list(originals), gradient)
    return list(results)


@ops.RegisterGradient(_NAME)  # type: ignore[untyped-decorator]
def _own_gradient(operation: Any, *gradients: Any) -> Sequence[Any]:
    gradient: Callable[..., Sequence[Any]] = operation.graph._smp_gradients[operation.name]
    return gradient(*gradients)


def is_recorded(tensor: Any) -> bool:
    """Tells whether gradients of a tensor can be asked for later.

    A tape says which tensors it follows. Without one there is ``tf.gradients``, which asks for any.
    """
    return not record.could_possibly_record() or record.should_record_backprop([tensor])


def is_followed(tensor: Any, in_body: bool) -> bool:
    """Tells whether gradients of a tensor, or of a variable, are asked for.

    Args:
        tensor: that is used beside others.
        in_body: gradients are asked for later, if no tape is there, unless it is a constant.
    """
    if not isinstance(tensor, tf.Tensor):
        return bool(getattr(tensor, "trainable", False))
    if record.could_possibly_record():
        return bool(record.should_record_backprop([tensor]))
    is_symbolic = not isinstance(tensor, ops.EagerTensor)
    return in_body and is_symbolic and tf.get_static_value(tensor) is None


def has_tangents(tensors: Sequence[Any]) -> bool:
    """Tells whether ``tf.autodiff.ForwardAccumulator`` follows any of the tensors."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Within, no tape sees what is done."""
    manager: contextlib.AbstractContextManager[None] = record.stop_recording()
    return manager


#: What the request for gradients that is under way asks them of.
_sources: ContextVar[tuple[Any, ...]] = ContextVar("sources", default=())
_is_vectorizing: ContextVar[bool] = ContextVar("is_vectorizing", default=False)


#: What the request for gradients that is under way reaches of variables of other processes.
_reached: ContextVar[dict[int, Any]] = ContextVar("reached", default={})  # noqa: B039


@contextlib.contextmanager
def reaching() -> Iterator[dict[int, Any]]:
    """Within, gradients are asked for; ``reach`` says of which variables of other processes.

    Yields:
        what has shape and dtype of each gradient, by ``id`` of the variable.
    """
    found: dict[int, Any] = {}
    token = _reached.set(found)
    try:
        yield found
    finally:
        _reached.reset(token)


def reach(variable: Any, like: Any) -> None:
    """Notes that the present request reaches a variable that this process does not have."""
    _reached.get()[id(variable)] = like


#: Tapes that record in this thread.
_tapes: ContextVar[tuple[Any, ...]] = ContextVar("tapes", default=())


#: What gradients that are asked for here begin with.
_start: ContextVar[Callable[[], float]] = ContextVar("start", default=lambda: 1.0)


@contextlib.contextmanager
def starting_from(number: Callable[[], float]) -> Iterator[None]:
    """Within, gradients are computed of a number times what they are asked of, and divided by it.

    Args:
        number: returns a power of two, by which numbers are multiplied without rounding.
    """
    token = _start.set(number)
    try:
        yield
    finally:
        _start.reset(token)


def requests_noted() -> contextlib.AbstractContextManager[None]:
    """Within, ``present_sources``, ``is_vectorizing`` and ``watched`` know what is under way."""
    return replaced(
        [
            Replacement(tf.GradientTape, "_push_tape", _begins),
            Replacement(tf.GradientTape, "_pop_tape", _pauses),
            Replacement(
                imperative_grad, "imperative_grad", _starting("target", "output_gradients")
            ),
            Replacement(imperative_grad, "imperative_grad", _noting("sources")),
            Replacement(gradients_util, "_GradientsHelper", _starting("ys", "grad_ys")),
            Replacement(gradients_util, "_GradientsHelper", _asking_for_watched),
            Replacement(gradients_util, "_GradientsHelper", _noting("xs")),
            Replacement(parallel_for, "_pfor_impl", _vectorizing),
        ]
    )


def _begins(original: Any) -> Any:
    def push(self: Any) -> None:
        original(self)
        _tapes.set((*_tapes.get(), self))

    return push


def _pauses(original: Any) -> Any:
    def pop(self: Any) -> None:
        original(self)
        _tapes.set(tuple(each for each in _tapes.get() if each is not self))

    return pop


def accessed(variable: Any) -> None:
    """Lets tapes know that a variable is used, as if it were read here."""
    resource_variable_ops.variable_accessed(variable)


def watched(tensor: Any) -> Any:
    """Returns a tensor whose gradient is asked for with all others, whatever those are of."""
    for tape in _tapes.get():
        tape.watch(tensor)
    graph = tensor.graph
    graph._smp_watched = [*getattr(graph, "_smp_watched", []), tensor]
    return tensor


def _asking_for_watched(original: Any) -> Any:
    """Returns what makes ``tf.gradients`` ask for those of ``watched`` tensors as well."""

    def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        asked = list(xs) if isinstance(xs, (list, tuple)) else [xs]
        more = getattr(ops.get_default_graph(), "_smp_watched", [])
        return original(ys, [*asked, *more], *args, **kwargs)[: len(asked)]

    return helper


def _starting(targets: str, starts: str) -> Callable[[Any], Any]:
    """Returns what makes a function begin gradients as ``starting_from`` says.

    Args:
        targets: name of its argument that is differentiated.
        starts: name of its argument that gradients begin with.
    """

    def make(original: Any) -> Any:
        place = inspect.signature(original)

        @functools.wraps(original)
        def starting(*args: Any, **kwargs: Any) -> Any:
            number = _start.get()()
            if number == 1.0:
                return original(*args, **kwargs)
            bound = place.bind(*args, **kwargs)
            asked = _listed(bound.arguments[targets])
            given = _listed(bound.arguments.get(starts) or [None] * len(asked))
            bound.arguments[starts] = [
                _times(tf.ones_like(target) if start is None else start, number)
                for target, start in zip(asked, given, strict=True)
            ]
            results = original(*bound.args, **bound.kwargs)
            return [each if each is None else _times(each, 1 / number) for each in results]

        return starting

    return make


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _times(tensor: Any, number: float) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        values = _times(tensor.values, number)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(number, tensor.dtype)


def is_vectorizing() -> bool:
    """Tells whether operations are made to be vectorized, as Jacobians and others do it."""
    return _is_vectorizing.get()


def _vectorizing(original: Any) -> Any:
    def vectorizing(*args: Any, **kwargs: Any) -> Any:
        token = _is_vectorizing.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _is_vectorizing.reset(token)

    return vectorizing


def present_sources() -> tuple[Any, ...]:
    """Returns what a tape, or ``tf.gradients``, is asked for the gradients of."""
    return _sources.get()


def _noting(name: str) -> Callable[[Any], Any]:
    """Returns what makes a function note its argument of this name while it runs."""

    def make(original: Any) -> Any:
        place = inspect.signature(original)

        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            asked = place.bind(*args, **kwargs).arguments[name]
            token = _sources.set(tuple(tf.nest.flatten(asked)))
            try:
                return original(*args, **kwargs)
            finally:
                _sources.reset(token)

        return noting

    return make
