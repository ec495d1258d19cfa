"""What members of the population are made with."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Side

BATCH = 8


def numbers(*shape: int) -> Any:
    """Returns a batch of numbers."""
    return tf.constant(np.random.RandomState(0).standard_normal((BATCH, *shape)), tf.float32)


def tokens(largest: int, *shape: int) -> Any:
    """Returns a batch of integers below one."""
    return tf.constant(np.random.RandomState(0).randint(0, largest, (BATCH, *shape)))


def given(side: Side, model: Any) -> Any:
    """Returns a model of Keras as one of a side."""
    return model if side.base is tf.keras.Model else side.base(model)


def computing(side: Side, model: Any, loss_of: Any) -> Any:
    """Returns a step that computes gradients and a loss."""

    @side.step
    def compute(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, *given)
        return tape.gradient(loss, model.trainable_variables), loss

    return compute


def square(model: Any, x: Any) -> Any:
    """Returns a loss."""
    return tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
