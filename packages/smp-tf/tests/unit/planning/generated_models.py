"""Models of Keras made of a seed, and their traces."""

from __future__ import annotations

import random
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.record.tracing import LayerNames, Trace, trace

L = tf.keras.layers
EXAMPLES, LENGTH, WIDTH = 4, 6, 8


class Mixed(L.Layer):
    """Layers in a layer, one of which may be called twice, and what it computes itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.parts = [L.Dense(draw.choice((WIDTH, 2 * WIDTH)), "relu") for _ in range(2)]
        self.last = L.Dense(WIDTH)
        self.own = self.add_weight(shape=(WIDTH,), initializer="ones")
        self.again = draw.choice((False, True))

    def build(self, input_shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        y = x * tf.convert_to_tensor(self.own)
        for part in self.parts:
            y = part(y)
        y = self.last(y)
        return x + (
            self.last(tf.tile(y, [1, 1, 2])[..., : self.last.kernel.shape[0]])
            if (self.again and self.last.kernel.shape[0] <= 2 * WIDTH)
            else y
        )


def generated(seed: int) -> Any:
    """Returns a model of three to seven parts, of (EXAMPLES, LENGTH, WIDTH)."""
    draw = random.Random(seed)
    inputs = x = tf.keras.Input((LENGTH, WIDTH), batch_size=EXAMPLES)
    shared = L.Dense(WIDTH, "tanh")
    for place in range(draw.randint(3, 7)):
        kind = draw.choice(("dense", "norm", "mixed", "attention", "shared", "rnn", "conv", "skip"))
        if kind == "dense":
            x = L.Dense(WIDTH)(L.Dense(draw.choice((4, 16, 64)), "gelu")(x))
        elif kind == "norm":
            x = draw.choice((L.LayerNormalization, L.BatchNormalization))()(x)
        elif kind == "mixed":
            x = Mixed(seed + place)(x)
        elif kind == "attention":
            x = L.MultiHeadAttention(2, 4)(x, x)
        elif kind == "shared":
            x = shared(x)
        elif kind == "rnn":
            x = draw.choice((L.GRU, L.LSTM))(WIDTH, return_sequences=True)(x)
        elif kind == "conv":
            x = L.Conv1D(WIDTH, 3, padding="same")(x)
        else:
            x = L.Add()([x, L.Dropout(0.1)(x)])
    return tf.keras.Model(inputs, L.Dense(3)(x))


def traced_model(model: Any, spec: tf.TensorSpec | None = None) -> Trace:
    """Returns the trace of a model that has its variables already."""
    trained, every = (
        [keras.variable_of(each) for each in kind]
        for kind in (model.trainable_variables, model.variables)
    )
    return trace(
        "model",
        LayerNames(),
        lambda tensors: (model(*tensors, training=True), []),
        [spec or tf.TensorSpec([EXAMPLES, LENGTH, WIDTH])],
        [False],
        lambda create, **options: create(**options),
        lambda: (trained, every),
    )
