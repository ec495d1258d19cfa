"""Means of what a step returns for each microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.parameters.owners import Owner, owner_of, stand_in
from smdistributed.modelparallel.tensorflow.stepping.output import StepOutput

PARTS = [np.arange(6.0, dtype=np.float32).reshape(2, 3) - number for number in range(3)]


def products(weights: Sequence[float], dtype: tf.DType) -> int:
    """Returns how many products the mean of microbatches takes."""
    with tf.Graph().as_default() as graph:
        parts = [tf.compat.v1.placeholder(dtype, [2, 3]) for _ in weights]
        StepOutput(parts, weights).accumulate()
    return sum(op.type == "Mul" for op in graph.get_operations())


def test_equal_microbatches_are_scaled_once() -> None:
    assert products([1 / 3] * 3, tf.float32) == 1
    assert products([0.25, 0.5, 0.25], tf.float32) == 3


def test_the_mean_is_weighted() -> None:
    for weights in ([1 / 3] * 3, [0.25, 0.5, 0.25]):
        mean = StepOutput([tf.constant(part) for part in PARTS], weights).accumulate()
        expected = sum(part * weight for part, weight in zip(PARTS, weights, strict=True))
        np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_sums_in_half_precision_do_not_overflow() -> None:
    parts = [tf.constant([40000.0], tf.float16)] * 4
    assert StepOutput(parts, [0.25] * 4).accumulate().numpy() == [40000.0]


def test_means_of_what_another_process_has_are_of_it_too() -> None:
    owner = Owner(1, False, "kernel")
    parts = [stand_in(tf.zeros([2]), owner) for _ in range(2)]
    output = StepOutput(parts, [0.5, 0.5])
    for mean in (output.reduce_mean(), output.accumulate()):
        assert owner_of(mean) == owner
