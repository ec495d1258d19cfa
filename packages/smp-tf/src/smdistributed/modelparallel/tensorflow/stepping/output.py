"""The results of a step: one tensor a microbatch.

Source: smd_model_parallel_common_api.rst, StepOutput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.parameters.owners import is_absent

_METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """All microbatch versions of one tensor that a step function returned.

    Shape: that of the function's result; (microbatch, ...) where it has the batch axis.

    Args:
        outputs: by microbatch; tensors, or ``tf.IndexedSlices``.
        weights: share of the batch in each microbatch; their sum is 1.
    """

    def __init__(self, outputs: Sequence[Any], weights: Sequence[float]) -> None:
        self._outputs = list(outputs)
        self.weights = list(weights)

    @property
    def outputs(self) -> list[Any]:
        """The tensors, in the order of microbatches."""
        return list(self._outputs)

    def reduce_mean(self) -> Any:
        """Returns the mean over microbatches, weighted by their sizes.

        Shape: that of one microbatch's tensor.

        Raises:
            ValueError: the shapes differ.
        """
        if _is_stand_in(self._outputs[0]):
            return self._outputs[0]
        return self._sum("reduce_mean", self._weighted())

    def reduce_sum(self) -> Any:
        """Returns the sum over microbatches.

        Shape: that of one microbatch's tensor.

        Raises:
            ValueError: the shapes differ.
        """
        return self._sum("reduce_sum", self._outputs)

    def concat(self) -> Any:
        """Returns the tensors joined along the first axis: the order of the batch.

        Shape: (microbatch, ...) to (batch, ...).

        Raises:
            ValueError: they are scalars.
        """
        if any(
            getattr(each, "shape", None) is not None and each.shape.rank == 0
            for each in self._outputs
        ):
            raise ValueError(
                "concat joins tensors along their first axis; these are scalars, which have none: "
                "use stack() or reduce_mean()."
            )
        return tf.concat([_dense(each) for each in self._outputs], axis=0)

    def merge(self) -> Any:
        """Same as ``concat``."""
        return self.concat()

    def stack(self) -> Any:
        """Returns the tensors under a new first axis, one entry a microbatch.

        Shape: (...) to (microbatches, ...).
        """
        return tf.stack([_dense(each) for each in self._outputs])

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """Returns the same as ``reduce_mean``, up to rounding.

        Shape: that of one microbatch's tensor.

        Args:
            method: ``add_n``, ``accumulate_n``, or ``variable``, which adds each tensor as soon as
                it is there, so that they need not all be kept.
            var: for ``variable``: where to add up; overwritten. Without one the sum is a tensor.

        Raises:
            ValueError: another method, or ``var`` has another shape or dtype.
        """
        if method not in _METHODS:
            raise ValueError(
                f"accumulate has the methods {', '.join(_METHODS)}; received {method!r}: use one."
            )
        self._check_shapes("accumulate")
        if _is_stand_in(self._outputs[0]):
            return self._outputs[0]
        if method == "variable" and var is None and self._scales_sums():
            return _scaled(_added(self._outputs), self.weights[0])
        parts = self._weighted()
        if method == "variable" and var is not None:
            return self._into(var, parts)
        if isinstance(parts[0], tf.IndexedSlices):
            return self._sum("accumulate", parts)
        if method == "accumulate_n":
            return tf.math.accumulate_n(parts)
        if method == "add_n":
            return tf.add_n(parts)
        return _added(parts)

    def _scales_sums(self) -> bool:
        """Tells whether one product scales the sum, in the place of one a microbatch.

        Not in half precision, where a sum may be too large that the mean is not.
        """
        first = self._outputs[0]
        return (
            not isinstance(first, tf.IndexedSlices)
            and first.dtype in (tf.float32, tf.float64)
            and all(isinstance(weight, float) for weight in self.weights)
            and len(set(self.weights)) == 1
        )

    def _into(self, var: Any, parts: Sequence[Any]) -> Any:
        like = _dense(parts[0])
        if not like.shape.is_compatible_with(var.shape) or like.dtype != var.dtype:
            raise ValueError(
                f"var must have the shape and dtype of what is added up, {like.shape} and "
                f"{like.dtype.name}; received {var.shape} and {tf.as_dtype(var.dtype).name}."
            )
        with tf.control_dependencies([var.assign(like)]):
            for part in parts[1:]:
                with tf.control_dependencies([var.assign_add(_dense(part))]):
                    pass
        return tf.convert_to_tensor(var)

    def _weighted(self) -> list[Any]:
        return [
            _scaled(each, weight) for each, weight in zip(self._outputs, self.weights, strict=True)
        ]

    def _check_shapes(self, method: str) -> None:
        shapes = [each.shape for each in self._outputs]
        if any(not shape.is_compatible_with(shapes[0]) for shape in shapes):
            raise ValueError(
                f"{method} needs tensors of one shape; the microbatches have "
                f"{', '.join(map(str, shapes))}: use concat(), or reduce them in the step function."
            )

    def _sum(self, method: str, parts: Sequence[Any]) -> Any:
        self._check_shapes(method)
        if isinstance(parts[0], tf.IndexedSlices):
            return tf.IndexedSlices(
                tf.concat([part.values for part in parts], axis=0),
                tf.concat([part.indices for part in parts], axis=0),
                parts[0].dense_shape,
            )
        return tf.add_n(list(parts))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """Refuses to be one tensor.

        Raises:
            TypeError: always.
        """
        raise self._is_several("tensor")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Refuses to be one array, as NumPy asks for it.

        Raises:
            TypeError: always.
        """
        raise self._is_several("array")

    def _is_several(self, what: str) -> TypeError:
        return TypeError(
            "what a step function returns has a tensor for each microbatch "
            f"({len(self._outputs)}); received it where one {what} is needed: take accumulate() of "
            "gradients, reduce_mean() of losses, merge() of what has the batch axis."
        )

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"


def _is_stand_in(value: Any) -> bool:
    """Tells whether a value is dense and of another process, so that its mean stands for as much.

    Slices become more with each microbatch.
    """
    return not isinstance(value, tf.IndexedSlices) and is_absent(value)


def _added(parts: Sequence[Any]) -> Any:
    """Returns a sum, to which each tensor is added as soon as it is there."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _dense(value: Any) -> Any:
    return tf.convert_to_tensor(value)


def _scaled(value: Any, weight: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(value.values, weight), value.indices, value.dense_shape)
    if value.dtype.is_integer or value.dtype == tf.bool:
        return tf.cast(value, tf.float64) * weight
    return value * tf.cast(weight, value.dtype)
