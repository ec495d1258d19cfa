"""What a function was called with, as a key: equal for calls that one graph of it serves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.record.structure import is_composite

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, tf.DType)


class Likeness:
    """A key of nested data: names, order and kinds of containers, and what the leaves are.

    Numbers and words count by value, objects that can change and say when they are equal (lists in
    objects, namespaces, sets) by their present value, and all others by identity; these are kept,
    so that no later one takes their place.

    Args:
        value: nested as TensorFlow nests.
        of_tensor: returns what counts of a tensor, an array or a variable.

    Raises:
        UnsupportedError: an object can change, but cannot be copied to be compared later.
    """

    def __init__(self, value: Any, of_tensor: Callable[[Any], Hashable]) -> None:
        self._structure = tf.nest.map_structure(lambda _: None, value)
        self._leaves = tuple(_key(leaf, of_tensor) for leaf in tf.nest.flatten(value))

    def __hash__(self) -> int:
        return hash(self._leaves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Likeness) or self._leaves != other._leaves:
            return False
        try:
            tf.nest.assert_same_structure(self._structure, other._structure)
        except (TypeError, ValueError):
            return False
        return True


def spec_of(tensor: Any) -> Hashable:
    """Returns the shape and dtype of a tensor, and what else makes another graph of it."""
    if is_composite(tensor):
        spec: Hashable = tf.type_spec_from_value(tensor)
        return spec
    shape = tf.TensorShape(tensor.shape)
    return None if shape.rank is None else tuple(shape.as_list()), tf.as_dtype(tensor.dtype).name


def _key(leaf: Any, of_tensor: Callable[[Any], Hashable]) -> Hashable:
    if tf.is_tensor(leaf) or isinstance(leaf, np.ndarray):
        return "tensor", of_tensor(leaf)
    if leaf is None or isinstance(leaf, _PLAIN):
        # By what it looks like: -0.0 is equal to 0.0, and no NaN to itself.
        return type(leaf), repr(leaf)
    try:
        hash(leaf)
    except TypeError:
        return _Changing(leaf)
    return _Same(leaf)


class _Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value


class _Changing:
    """An object without a hash, as it was."""

    def __init__(self, value: Any) -> None:
        self._type = type(value)
        try:
            self._value = copy.deepcopy(value)
        except Exception as error:
            raise UnsupportedError(
                "an argument that is no tensor must be hashable, or can be copied to see later "
                f"whether it has changed; received {value!r}, which cannot ({error}): pass its "
                "parts, or give its class __hash__."
            ) from error

    def __hash__(self) -> int:
        return hash(self._type)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Changing) or other._type is not self._type:
            return False
        try:
            return bool(self._value == other._value)
        except Exception:  # what cannot be compared is not known to be equal
            return False
