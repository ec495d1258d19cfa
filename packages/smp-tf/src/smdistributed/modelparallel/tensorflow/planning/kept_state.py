"""What Keras's optimizers keep for what they train, and what an update does: without memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.keras import (
    IS_KERAS_3,
    optimizer_bases,
    optimizer_variables,
    scales,
    variable_of,
)
from smdistributed.modelparallel.tensorflow.record.sizes import num_bytes
from smdistributed.modelparallel.tensorflow.record.work import VIEWS, Work, work_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """What an optimizer costs for one variable.

    Attributes:
        num_bytes: that it keeps.
        moved_bytes: that an update reads and writes; 0 where that is not known.
        made_bytes: of the tensors that are there at one time in an update; likewise.
    """

    num_bytes: float = 0.0
    moved_bytes: float = 0.0
    made_bytes: float = 0.0


def live_optimizers() -> list[Any]:
    """Returns the optimizers that the process has, without those that others wrap."""
    bases = tuple(optimizer_bases())
    found = [each for each in gc.get_objects() if isinstance(each, bases)]
    wrapped = {id(each.inner_optimizer) for each in found if scales(each)}
    return [each for each in found if id(each) not in wrapped]


def kept_for(optimizer: Any, shape: Sequence[int], dtype: Any) -> Kept:
    """Returns what an optimizer costs for a variable: what a copy of it does for a stand-in.

    Variables of a graph that never runs have no memory.

    Raises:
        Exception: the optimizer cannot be copied, or not be built.
    """
    if scales(optimizer):
        optimizer = optimizer.inner_optimizer  # beside which there are two scalars
    with tf.init_scope():
        config = optimizer.get_config()
    with tf.Graph().as_default() as graph:
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
        kept = sum(_size(variable) for variable in made.values() if variable.shape.rank)
        before = set(graph.get_operations())
        try:
            gradient = tf.compat.v1.placeholder(dtype, list(shape))
            copied.update_step(gradient, stand_in, tf.compat.v1.placeholder(dtype, []))
        except Exception:  # of Keras 2, or with a signature of its own
            logger.debug("the update of %r is not counted", optimizer, exc_info=True)
            return Kept(float(kept))
        update = [op for op in graph.get_operations() if op not in before]
        work = sum((work_of(graph, op) for op in update), Work())
    return Kept(float(kept), work.moved_bytes, float(_most_at_once(update)))


def _most_at_once(ops: Collection[Any]) -> int:
    """Returns the most bytes that operations in order have made and still need.

    What is as large as something that it alone reads takes its place, as TensorFlow does.
    """
    last = {tensor.name: place for place, op in enumerate(ops) for tensor in op.inputs}
    alive: dict[str, int] = {}
    most = 0
    for place, op in enumerate(ops):
        if op.type in VIEWS or op.type == "Placeholder":
            continue
        ending = [each.name for each in op.inputs if last[each.name] == place]
        ended = [alive.pop(name, 0) for name in dict.fromkeys(ending)]
        for tensor in op.outputs:
            alive[tensor.name] = num_bytes(tensor)
        is_in_place = any(size in ended for size in map(num_bytes, op.outputs))
        most = max(most, sum(alive.values()) + (0 if is_in_place else sum(ended)))
    return most


def _size(variable: Any) -> int:
    return int(variable.dtype.size) * int(variable.shape.num_elements())
