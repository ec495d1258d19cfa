"""The arguments of a step as microbatches, also of a batch whose size is known in the step only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common import containers
from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.microbatch import (
    Microbatches,
    SplitRules,
    split_arguments,
)
from smdistributed.modelparallel.tensorflow.record.structure import is_composite


class _Tensors:
    """TensorFlow's tensors, as smp-common cuts them."""

    knows_shapes = True

    def is_tensor(self, value: object) -> bool:
        return bool(tf.is_tensor(value)) or isinstance(value, np.ndarray)

    def shape(self, value: Any) -> Sequence[int]:
        return tuple(value.shape)

    def narrow(self, value: Any, axis: int, start: int, length: int) -> Any:
        if isinstance(value, tf.RaggedTensor):
            if axis != 0:
                raise UnsupportedError(
                    f"ragged tensors are split along their first axis; received axis {axis}: give "
                    "them whole (non_split_inputs), or as dense tensors."
                )
            return value[start : start + length]
        begin = [0] * len(value.shape)
        size = [-1] * len(value.shape)
        begin[axis], size[axis] = start, length
        if isinstance(value, tf.SparseTensor):
            ends = tf.where(tf.equal(size, -1), value.dense_shape, tf.cast(size, tf.int64))
            part = tf.sparse.slice(value, tf.cast(begin, tf.int64), ends)
            shape = value.shape.as_list()
            shape[axis] = length
            if any(tf.is_tensor(each) or each is None for each in shape):
                return part
            return tf.SparseTensor(part.indices, part.values, shape)
        return tf.slice(value, begin, size)

    def take_apart(self, value: object) -> Container | None:
        # What TensorFlow nests: it would take the tensors of a data class for constants.
        if isinstance(value, (set, frozenset)) or tf.nest.is_nested(value):
            return containers.take_apart(value)
        return None

    def is_state(self, value: object) -> bool:
        states = (tf.Variable, tf.Module, tf.keras.layers.Layer, tf.keras.optimizers.Optimizer)
        return isinstance(value, states)


TENSORS = _Tensors()


class _UnknownBatch(_Tensors):
    """Tensors of a batch whose size is known in the step only.

    They stand for tensors of one example a microbatch; the parts are those of the real size.
    """

    knows_shapes = False

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self.size: Any = None

    def shape(self, value: Any) -> Sequence[int]:
        return (self._microbatches,) * len(value.shape)

    def narrow(self, value: Any, axis: int, start: int, length: int) -> Any:
        size = _length(value, axis)
        if self.size is None:
            message = (
                f"a batch must have at least {self._microbatches} examples, one a microbatch: "
                "leave smaller ones out, as drop_remainder=True of a dataset's batch() does"
            )
            with tf.control_dependencies(
                [tf.debugging.assert_greater_equal(size, self._microbatches, message)]
            ):
                self.size = tf.identity(size)
        message = "all split arguments of a step must have the same batch size"
        with tf.control_dependencies([tf.debugging.assert_equal(size, self.size, message)]):
            begin, end = self.bound(start), self.bound(start + 1)
        part = super().narrow(value, axis, begin, end - begin)
        if is_composite(value):
            return part
        shape = value.shape.as_list()
        shape[axis] = None
        part.set_shape(shape)
        return part

    def bound(self, microbatch: int) -> Any:
        """Returns where a microbatch begins: their sizes differ by at most one, larger first."""
        each, larger = self.size // self._microbatches, self.size % self._microbatches
        return microbatch * each + tf.minimum(microbatch, larger)

    def weight(self, microbatch: int) -> Any:
        """Returns the share of the batch that a microbatch has."""
        part = self.bound(microbatch + 1) - self.bound(microbatch)
        return tf.cast(part, tf.float64) / tf.cast(self.size, tf.float64)


def split(
    rules: SplitRules, microbatches: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Microbatches, Sequence[Any]]:
    """Returns the calls of the microbatches, and their weights, which may be tensors.

    Shape: (batch, ...) to (microbatch, ...), along the axis that the rules name.
    """
    leaves = tf.nest.flatten((args, kwargs))
    if not any(tf.is_tensor(leaf) and _is_unknown(leaf) for leaf in leaves):
        cut = split_arguments(TENSORS, rules, microbatches, args, kwargs)
        return cut, cut.weights
    tensors = _UnknownBatch(microbatches)
    cut = split_arguments(tensors, rules, microbatches, args, kwargs)
    return cut, [tensors.weight(number) for number in range(microbatches)]


def checks_of(cut: Microbatches, weights: Sequence[Any]) -> list[Any]:
    """Returns tensors of the present graph that exist where the sizes of a batch are as they must.

    What waits for other processes is to wait for them, see ``Links.begin_after``.
    """
    if not any(map(tf.is_tensor, weights)):
        return []  # sizes are known, and were checked
    here = tf.compat.v1.get_default_graph()
    parts = tf.nest.flatten((cut.calls, weights), expand_composites=True)
    return [each for each in parts if tf.is_tensor(each) and getattr(each, "graph", None) is here]


def _is_unknown(tensor: Any) -> bool:
    """Tells whether the length of a tensor along some axis to be cut is known in the step only."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.shape[0] is None
    return tensor.shape.rank is None or None in tensor.shape.as_list()


def _length(tensor: Any, axis: int) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[axis], tf.int32)
    return tf.shape(tensor)[axis]
