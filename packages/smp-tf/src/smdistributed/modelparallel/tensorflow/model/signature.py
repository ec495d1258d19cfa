"""What calls of a model are told apart by, and how to repeat one with other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.record.structure import Structure


@dataclass(eq=False)
class Signature:
    """How to call the model with tensors alone.

    Attributes:
        key: equal for calls that one trace serves.
        tensors: those among the arguments.
        structure: of the arguments.
    """

    key: tuple[Any, ...]
    tensors: list[Any]
    structure: Structure

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors in these places."""
        args, kwargs = self.structure.filled(tensors)
        return args, kwargs


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Returns what traces are told apart by: shapes, dtypes, and everything that is no tensor."""
    given = tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf,
        (args, kwargs),
    )
    structure = Structure(given)
    leaves = tf.nest.flatten(given, expand_composites=True)
    tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
    shapes = tuple(
        (None if t.shape.rank is None else tuple(t.shape.as_list()), t.dtype.name) for t in tensors
    )
    others = tuple(map(repr, structure.others))
    return Signature((shapes, others, structure.are_tensors), tensors, structure)


def example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what a model is called with when it serves: specs, and no training."""
    specs = tf.nest.map_structure(
        lambda each: tf.TensorSpec(each.shape, tf.as_dtype(each.dtype)), tuple(args)
    )
    return specs, {**kwargs, "training": False} if "training" in kwargs else dict(kwargs)


def is_differentiable(tensor: Any) -> bool:
    """Tells whether an input comes from variables or from another call of a model in the step."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return False
    stack, seen = [tensor], set()
    while stack:
        op = getattr(stack.pop(), "op", None)
        if op is None or op in seen:
            continue
        seen.add(op)
        if op.type in ("ReadVariableOp", "ResourceGather") or "SmpCall" in op.name:
            return True
        stack += list(op.inputs)
    return False
