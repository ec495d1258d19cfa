"""Traces of small models, as one process makes them without any others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import graphs, keras
from smdistributed.modelparallel.tensorflow.planning.placement import Placement, place
from smdistributed.modelparallel.tensorflow.record.tracing import (
    PARTITION,
    LayerNames,
    Trace,
    trace,
)

L = tf.keras.layers
WIDTH = 4


def on(partition: int) -> AbstractContextManager[None]:
    """Within, operations are wanted on a partition, as in ``smp.partition``."""
    return graphs.attributes({PARTITION: partition})


def dense(name: str, width: int = WIDTH) -> Any:
    """Returns a layer that has its variables already."""
    layer = L.Dense(width, name=name, use_bias=False)
    layer.build((None, WIDTH))
    return layer


def variable(layer: Any) -> Any:
    """Returns TensorFlow's variable of a layer of ``dense``."""
    return keras.variable_of(layer.kernel)


def traced(call: Callable[[Any], Any], *layers: Any) -> Trace:
    """Returns the trace of a function of one batch that calls layers."""
    variables = [variable(layer) for layer in layers]
    return trace(
        "model",
        LayerNames(),
        lambda tensors: (call(*tensors), []),
        [tf.TensorSpec([2, WIDTH])],
        [False],
        lambda create, **options: create(**options),
        lambda: (variables, variables),
    )


def placed(
    one: Trace, num_partitions: int = 2, *, is_automatic: bool = False, optimize: str = "memory"
) -> tuple[dict[Any, int], dict[int, int]]:
    """Returns the partition of each operation, and of each variable by its ``id``."""
    placement = Placement()
    found = place(
        one,
        placement,
        num_partitions=num_partitions,
        is_automatic=is_automatic,
        default_partition=0,
        optimize=optimize,
    )
    return found, placement.homes
