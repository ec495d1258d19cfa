"""Lengths to which tensors are filled up of which a step alone knows the shape.

TensorFlow keeps the shape of a collective by its key. So they travel flat, in one of few lengths,
each of which has a key of its own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

#: Three between two powers of two, which is a quarter of filling at most.
LENGTHS = tuple(
    sorted({max(1, part << power >> 2) for power in range(40) for part in (4, 5, 6, 7)})
)


def next_length(count: Any) -> tuple[Any, Any]:
    """Returns the length to which a number of elements is filled up, and its place among all."""
    lengths = tf.constant([each for each in LENGTHS if each < 2**31], tf.int32)
    place = tf.searchsorted(lengths, count[tf.newaxis])[0]
    return tf.gather(lengths, place), place


def filled(tensor: Any) -> tuple[Any, Any]:
    """Returns a tensor flat and filled up, and the place of its length among all."""
    flat = tf.reshape(tensor, [-1])
    count = tf.size(flat)
    length, place = next_length(count)
    return tf.pad(flat, [[0, length - count]]), place


def emptied(flat: Any, shape: Any) -> Any:
    """Returns what was ``filled``."""
    return tf.reshape(flat[: tf.reduce_prod(shape)], shape)
