"""A body that trains for many steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_worlds import library

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.modelparallel.common.testing.footprint import check_long_run

WIDTH = 4


def train(num_first: int, num_steps: int) -> None:
    """Asserts that a process holds no more after many steps than after the first of them."""
    layers = [tf.keras.layers.Dense(WIDTH, name=f"dense_{number}") for number in range(2)]
    model = smp.DistributedModel(tf.keras.Sequential([tf.keras.Input((WIDTH,)), *layers]))
    optimizer = tf.keras.optimizers.SGD(1e-3, global_clipnorm=1.0)

    @smp.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def step(x: Any) -> None:
        means = [smp.allreduce(each.accumulate()) for each in compute(x)]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))

    calls = library().calls
    calls.extend([] for _ in range(calls.maxlen))  # as many are kept from the beginning
    x = tf.ones([8, WIDTH])
    check_long_run(lambda: step(x), num_first, num_steps)
