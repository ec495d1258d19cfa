"""What calls of a model are told apart by, and how to repeat one with other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.record.likeness import Likeness, spec_of
from smdistributed.modelparallel.tensorflow.record.structure import (
    Structure,
    is_composite,
    leaves_of,
)


@dataclass(eq=False)
class Signature:
    """How to call the model with tensors alone.

    Attributes:
        key: equal for calls that one trace serves.
        tensors: those among the arguments, then their masks.
        structure: of the arguments.
        masked: places of the tensors that have a mask.
    """

    key: Likeness
    tensors: list[Any]
    structure: Structure
    masked: list[int]

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors in these places."""
        masks = tensors[len(tensors) - len(self.masked) :]
        for place, mask in zip(self.masked, masks, strict=True):
            keras.set_mask(tensors[place], mask)
        args, kwargs = self.structure.filled(tensors)
        return args, kwargs


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Returns what traces are told apart by: everything but the numbers in tensors."""
    given = tf.nest.map_structure(_converted, (args, kwargs))
    tensors = [leaf for leaf in leaves_of(given) if tf.is_tensor(leaf)]
    masks = [keras.mask_of(tensor) for tensor in tensors]
    masked = [place for place, mask in enumerate(masks) if mask is not None]
    key = Likeness((given, masks), spec_of)
    tensors += [masks[place] for place in masked]
    return Signature(key, tensors, Structure(given), masked)


def example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what a model is called with when it serves: specs for tensors, and no training."""

    def spec(leaf: Any) -> Any:
        if is_composite(leaf):
            return tf.type_spec_from_value(leaf)
        is_array = tf.is_tensor(leaf) or isinstance(leaf, np.ndarray)
        return tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)) if is_array else leaf

    if "training" in kwargs and not tf.is_tensor(kwargs["training"]):
        kwargs = {**kwargs, "training": False}
    specs: tuple[Any, dict[str, Any]] = tf.nest.map_structure(spec, (tuple(args), dict(kwargs)))
    return specs


def _converted(leaf: Any) -> Any:
    """Returns arrays and variables as tensors: what is called with them gets their values."""
    if isinstance(leaf, np.ndarray) or keras.is_variable(leaf):
        return tf.convert_to_tensor(leaf)
    return leaf
