"""What Keras's optimizers keep for what they train, found without memory for it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.keras import (
    IS_KERAS_3,
    optimizer_bases,
    optimizer_variables,
    scales,
    variable_of,
)


def live_optimizers() -> list[Any]:
    """Returns the optimizers that the process has, without those that others wrap."""
    bases = tuple(optimizer_bases())
    found = [each for each in gc.get_objects() if isinstance(each, bases)]
    wrapped = {id(each.inner_optimizer) for each in found if scales(each)}
    return [each for each in found if id(each) not in wrapped]


def bytes_for(optimizer: Any, shape: Sequence[int], dtype: Any) -> float:
    """Returns what an optimizer keeps for one variable: what a copy of it makes for a stand-in.

    Variables of a graph that never runs have no memory.

    Raises:
        Exception: the optimizer cannot be copied, or not be built.
    """
    with tf.init_scope():
        config = optimizer.get_config()
    with tf.Graph().as_default():
        copied = type(optimizer).from_config(config)
        known = {id(variable_of(each)) for each in optimizer_variables(copied)}
        kind: Any = tf.keras.Variable if IS_KERAS_3 else tf.Variable
        stand_in = kind(tf.zeros(list(shape), dtype), trainable=True, name="stand_in", dtype=dtype)
        copied.build([stand_in])
        made = {
            id(variable): variable
            for variable in map(variable_of, optimizer_variables(copied))
            if id(variable) not in known
        }
    return float(sum(_bytes(variable) for variable in made.values() if variable.shape.rank))


def _bytes(variable: Any) -> int:
    return int(variable.dtype.size) * int(variable.shape.num_elements())
