"""What the body returned for each microbatch, as the one result of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.parameters.owners import (
    is_absent,
    owner_of,
    stand_in,
)
from smdistributed.modelparallel.tensorflow.stepping.output import StepOutput


@dataclass(frozen=True)
class _Plain:
    """What a step returns that is no tensor: a value, or one a microbatch."""

    value: Any


@dataclass(frozen=True)
class _Absent:
    """What a step returns that another process has.

    Attributes:
        like: have shape and dtype, by microbatch.
        owner: who has it.
        weights: of the microbatches; of no consequence.
    """

    like: Sequence[Any]
    owner: Any
    weights: Sequence[float]

    def made(self) -> StepOutput:
        """Returns what stands for it."""
        return StepOutput([stand_in(each, self.owner) for each in self.like], self.weights)


def _is_result(value: Any) -> bool:
    return bool(tf.is_tensor(value)) or isinstance(value, (tf.IndexedSlices, tf.Variable))


def joined(results: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns the structure of the results with a StepOutput for each tensor.

    A number becomes a list with one entry a microbatch; anything else is that of the first one,
    with a warning if others differ.

    Shape: (microbatch, ...) in each StepOutput, as the body returned it.
    """

    def join(*leaves: Any) -> Any:
        if _is_result(leaves[0]):
            return StepOutput(leaves, weights)
        if isinstance(leaves[0], (int, float, np.number)) and not isinstance(leaves[0], bool):
            return _Plain(list(leaves))
        if not all(_is_equal(leaf, leaves[0]) for leaf in leaves):
            warnings.warn(
                "what a step function returns besides tensors and numbers is that of the first "
                f"microbatch; others returned another value than {leaves[0]!r}: return tensors or "
                "numbers.",
                stacklevel=2,
            )
        return _Plain(leaves[0])

    return tf.nest.map_structure(join, *results)


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except Exception:  # what cannot be compared is not known to be equal
        return False


def without_plain(structure: Any) -> Any:
    """Returns a result with Python's values in place."""
    return tf.nest.map_structure(
        lambda leaf: leaf.value if isinstance(leaf, _Plain) else leaf, structure
    )


def taken_apart(result: Any, tensors: list[Any]) -> Callable[[Sequence[Any]], Any]:
    """Adds the tensors of a result to a list; returns what builds the result from such a list."""
    leaves: list[StepOutput | _Plain] = tf.nest.flatten(result)
    places: list[tuple[int, int, Sequence[float]] | _Plain | _Absent] = []
    for leaf in leaves:
        if isinstance(leaf, _Plain):
            places.append(leaf)
            continue
        if is_absent(leaf.outputs[0]) and not isinstance(leaf.outputs[0], tf.IndexedSlices):
            # Made anew: what another process has need not be computed here.
            specs = [tf.TensorSpec(each.shape, each.dtype) for each in leaf.outputs]
            places.append(_Absent(specs, owner_of(leaf.outputs[0]), [1.0] * len(specs)))
            continue
        begin = len(tensors)
        tensors += leaf.outputs
        end = len(tensors)
        if any(tf.is_tensor(weight) for weight in leaf.weights):
            tensors += leaf.weights
            places.append((begin, end, ()))
        else:
            places.append((begin, end, leaf.weights))

    def rebuild(values: Sequence[Any]) -> Any:
        built: list[StepOutput | _Plain] = []
        for place in places:
            if isinstance(place, _Plain):
                built.append(place)
                continue
            if isinstance(place, _Absent):
                built.append(place.made())
                continue
            begin, end, weights = place
            weights = weights or values[end : 2 * end - begin]
            built.append(StepOutput(values[begin:end], weights))
        return without_plain(tf.nest.pack_sequence_as(result, built))

    return rebuild
