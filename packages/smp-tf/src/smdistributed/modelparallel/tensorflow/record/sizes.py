"""How large the tensors of a graph are, as far as it says."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf


def is_constant(op: Any) -> bool:
    """Tells whether every process may have its own copy of an operation: constants."""
    return op.type == "Const" and not op.control_inputs


def num_elements(tensor: Any) -> int:
    """Returns how many numbers a tensor has; dimensions that are not known count as 1."""
    if tensor.shape.rank is None:
        return 0
    return math.prod(1 if length is None else int(length) for length in tensor.shape)


def num_bytes(tensor: Any) -> int:
    """Returns the size of a tensor; dimensions that are not known count as 1."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return int(tensor.dtype.size) * num_elements(tensor)
