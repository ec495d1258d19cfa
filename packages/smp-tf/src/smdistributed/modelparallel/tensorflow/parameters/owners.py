"""Values that know which partition has them.

The variables of a model, and the gradients by them, are each in the process of one partition. All
processes run the same script, so they compute with all of these; what is computed of values of one
partition is right in its process alone, and the others have stand-ins of the same shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.gradients import unrecorded
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted

_NAME = "_smp_owner"
#: Shapes of stand-ins that are kept.
_MOST_SHAPES = 256


@dataclass(frozen=True)
class Owner:
    """Who has a value.

    Attributes:
        partition: that has it.
        is_here: whether that is this process.
        name: of the variable that it was computed from, or of one of them.
        is_gradient: whether it is a gradient, or computed of gradients alone.
        variable: TensorFlow's, where the value is one, or stands for one; else None.
        number: of the variable whose value it is, in all processes; None if it is computed.
        moment: at which it was the value of that variable.
    """

    partition: int
    is_here: bool
    name: str = field(compare=False)
    is_gradient: bool = False
    variable: Any = field(default=None, compare=False, repr=False)
    number: int | None = field(default=None, compare=False)
    moment: int = field(default=0, compare=False)

    @functools.cached_property
    def of_value(self) -> Owner:
        """Who has what is computed of this."""
        is_computed = self.variable is None and self.number is None
        return self if is_computed else replace(self, variable=None, number=None)

    def as_read(self, moment: int) -> Owner:
        """Returns who has the value that a variable has at this moment."""
        return replace(self, variable=None, moment=moment)

    @functools.cached_property
    def of_gradient(self) -> Owner:
        """Who has a gradient by this."""
        return replace(self, variable=None, number=None, is_gradient=True)


def owner_of(value: Any) -> Owner | None:
    """Returns who has a tensor, a variable or a handle; None if all processes do."""
    # Tensors make errors of their own for what they do not have, which takes long.
    known = getattr(value, "__dict__", None)
    return None if known is None else known.get(_NAME)


def note(value: Any, owner: Owner | None) -> None:
    """Notes who has a value."""
    if owner is not None or owner_of(value) is not None:
        setattr(value, _NAME, owner)


def is_absent(value: Any) -> bool:
    """Tells whether a value is in another process, and this one has a stand-in."""
    if isinstance(value, tf.IndexedSlices):
        value = value.values
    owner = owner_of(value)
    return owner is not None and not owner.is_here


def stand_in(like: Any, owner: Owner) -> Any:
    """Returns what this process has in place of a value of another one.

    Eager ones of a shape share their memory; those of a graph cost nothing where nobody uses them.

    Args:
        like: has shape and dtype; or ``tf.IndexedSlices`` of such.
        owner: who has the value.
    """
    if isinstance(like, tf.IndexedSlices):
        rows, whole = tf.TensorShape([None]).merge_with(like.indices.shape), like.shape
        return tf.IndexedSlices(
            _stand_in(rows + whole[1:], like.values.dtype, owner),
            _stand_in(rows, like.indices.dtype, owner),
            None
            if like.dense_shape is None
            else tf.constant(whole.as_list(), like.dense_shape.dtype),
        )
    return _stand_in(tf.TensorShape(like.shape), tf.as_dtype(like.dtype).base_dtype, owner)


def _stand_in(shape: Any, dtype: Any, owner: Owner) -> Any:
    sizes = tuple(size or 0 for size in shape.as_list())
    with unnoted(), unrecorded():
        is_eager = tf.executing_eagerly()
        value = tf.identity(_zeros(sizes, dtype)) if is_eager else tf.zeros(sizes, dtype)
        if not is_eager and not shape.is_fully_defined():
            value = tf.compat.v1.placeholder_with_default(value, shape)
    note(value, owner)
    return value


@functools.lru_cache(maxsize=_MOST_SHAPES)
def _zeros(sizes: Sequence[int], dtype: Any) -> Any:
    return tf.zeros(sizes, dtype)
