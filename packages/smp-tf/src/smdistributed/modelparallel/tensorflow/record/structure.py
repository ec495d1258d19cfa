"""Nested Python data and the tensors in it, apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def is_composite(value: Any) -> bool:
    """Tells whether a value consists of several tensors, as sparse and ragged tensors do."""
    return tf.is_tensor(value) and not isinstance(value, (tf.Tensor, tf.Variable, np.ndarray))


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves of nested data, those that consist of tensors taken apart."""
    return [part for leaf in tf.nest.flatten(value) for part in _parts(leaf)]


class Structure:
    """Nested Python data without its tensors.

    Args:
        value: lists, tuples, dicts and what TensorFlow nests besides, in any depth. Sparse and
            ragged tensors are taken apart, too.
        is_tensor: tells which leaves are taken out.

    Attributes:
        are_tensors: of each leaf, whether it was taken out.
        others: the other leaves.
    """

    def __init__(self, value: Any, is_tensor: Callable[[Any], bool] = tf.is_tensor) -> None:
        leaves = leaves_of(value)
        self.are_tensors = tuple(bool(is_tensor(leaf)) for leaf in leaves)
        self.others = [leaf for leaf in leaves if not is_tensor(leaf)]
        # Without its tensors, which would be kept alive with the graph that they belong to.
        self._like = tf.nest.map_structure(lambda _: None, value)
        self._specs = [
            tf.type_spec_from_value(leaf) if is_composite(leaf) else None
            for leaf in tf.nest.flatten(value)
        ]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Returns the data with these tensors in the places of those that were taken out."""
        given, others = iter(tensors), iter(self.others)
        parts = iter([next(given if is_tensor else others) for is_tensor in self.are_tensors])
        leaves = [next(parts) if spec is None else _whole(spec, parts) for spec in self._specs]
        return tf.nest.pack_sequence_as(self._like, leaves)


def _parts(leaf: Any) -> list[Any]:
    parts: list[Any] = tf.nest.flatten(leaf, expand_composites=True) if is_composite(leaf) else []
    return parts or [leaf]


def _whole(spec: Any, parts: Any) -> Any:
    count = len(tf.nest.flatten(spec, expand_composites=True))
    return tf.nest.pack_sequence_as(
        spec, [next(parts) for _ in range(count)], expand_composites=True
    )
