"""Nested Python data and the tensors in it, apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Structure:
    """Nested Python data without its tensors.

    Args:
        value: lists, tuples, dicts and what TensorFlow nests besides, in any depth.
        is_tensor: tells which leaves are taken out.
        expand_composites: whether sparse and ragged tensors are taken apart, too.

    Attributes:
        are_tensors: of each leaf, whether it was taken out.
        others: the other leaves.
    """

    def __init__(
        self,
        value: Any,
        is_tensor: Callable[[Any], bool] = tf.is_tensor,
        *,
        expand_composites: bool = True,
    ) -> None:
        leaves = tf.nest.flatten(value, expand_composites=expand_composites)
        self.are_tensors = tuple(bool(is_tensor(leaf)) for leaf in leaves)
        self.others = [leaf for leaf in leaves if not is_tensor(leaf)]
        self._expand_composites = expand_composites
        # Without its tensors, which would be kept alive with the graph that they belong to.
        self._like = value if expand_composites else self._packed(value, [None] * len(leaves))

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Returns the data with these tensors in the places of those that were taken out."""
        given, others = iter(tensors), iter(self.others)
        leaves = [next(given if is_tensor else others) for is_tensor in self.are_tensors]
        return self._packed(self._like, leaves)

    def _packed(self, like: Any, leaves: Sequence[Any]) -> Any:
        return tf.nest.pack_sequence_as(like, leaves, expand_composites=self._expand_composites)
