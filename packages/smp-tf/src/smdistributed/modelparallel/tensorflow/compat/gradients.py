"""Gradients of our own, and what tapes see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record
from tensorflow.python.framework import ops

#: The gradient that stands in graphs for all of ours. TensorFlow never forgets what is registered.
_NAME = "SmpGradient"


def with_gradient(
    originals: Sequence[Any], gradient: Callable[..., Sequence[Any]], label: str
) -> list[Any]:
    """Returns the tensors, with a gradient of our own, for tapes and ``tf.gradients`` alike.

    Args:
        originals: tensors of the present graph.
        gradient: takes a gradient (or None) for each, returns one (or None) for each. It lives as
            long as the graph.
        label: the name of the operation.
    """
    graph = ops.get_default_graph()
    with record.stop_recording(), graph.gradient_override_map({"IdentityN": _NAME}):
        results = tf.identity_n(list(originals), name=label)
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


def has_tangents(tensors: Sequence[Any]) -> bool:
    """Tells whether ``tf.autodiff.ForwardAccumulator`` follows any of the tensors."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Within, no tape sees what is done."""
    manager: contextlib.AbstractContextManager[None] = record.stop_recording()
    return manager
