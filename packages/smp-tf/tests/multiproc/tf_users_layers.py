"""Models with what layers of Keras do, as users write them, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import IS_KERAS_3, dense, model_of, train

L = tf.keras.layers


def masking(side: Side) -> Found:
    """A mask that Keras carries beside the tensors, from an embedding to a recurrence."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.table(x)
        with side.part(1):
            return model.head(model.cell(x))

    tokens = tf.constant(np.random.RandomState(0).randint(0, 3, (8, 6)))
    model = model_of(
        side,
        call,
        table=lambda: L.Embedding(5, WIDTH, mask_zero=True, name="table"),
        cell=lambda: L.LSTM(WIDTH, name="cell"),
        head=dense("head"),
    )
    return train(side, model, tokens)


def mask_of_the_caller(side: Side) -> Found:
    """A mask computed in the call, for attention."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            mask = x[:, :, 0] > 0.0
            y = model.first(x)
        with side.part(1):
            return model.attention(y, y, attention_mask=mask[:, tf.newaxis, :])

    batch = tf.constant(np.random.RandomState(0).standard_normal((8, 5, WIDTH)), tf.float32)
    attention = {"attention": lambda: L.MultiHeadAttention(2, 2, name="attention")}
    return train(side, model_of(side, call, first=dense("first"), **attention), batch)


def stateful_recurrence(side: Side) -> Found:
    """A recurrence that goes on where the batch before ended, and a mask up to Keras's loss."""
    numbers = np.random.RandomState(0).standard_normal((8, 5, WIDTH))
    numbers[:, 3:] *= np.arange(8)[:, np.newaxis, np.newaxis] % 3 > 0
    batch = tf.constant(numbers, tf.float32)
    mean = tf.keras.losses.MeanSquaredError()

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.cell(x)
        with side.part(1):
            return model.head(x)

    def cell() -> Any:
        return L.GRU(WIDTH, stateful=True, return_sequences=True, name="cell")

    model = model_of(side, call, cell=cell, head=dense("head"))
    masking = L.Masking()

    @side.step
    def compute(x: Any) -> Any:
        x = masking(x)  # whose mask goes into the model with its input, and out with its result
        with tf.GradientTape() as tape:
            loss = mean(0.3 * x, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    optimizer, losses = tf.keras.optimizers.SGD(0.1), []
    for _ in range(3):
        gradients, loss = compute(batch)
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def penalties(side: Side) -> Found:
    """Regularizers of weights and of activities, and losses that layers add."""

    class Adding(L.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * tf.reduce_sum(tf.square(x)))
            return x

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.adding(model.first(x))
        with side.part(1):
            return model.second(x)

    model = model_of(
        side,
        call,
        first=dense("first", kernel_regularizer=tf.keras.regularizers.L2(0.1)),
        adding=Adding,
        second=dense("second", activity_regularizer=tf.keras.regularizers.L1(0.1)),
    )
    return train(side, model, rows())


def constraints(side: Side) -> Found:
    """Weights that an optimizer projects."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    constraint = tf.keras.constraints.NonNeg()
    model = model_of(
        side,
        call,
        first=dense("first", kernel_constraint=constraint),
        second=dense("second", kernel_constraint=tf.keras.constraints.UnitNorm()),
    )
    return train(side, model, rows())


def spectral_norm(side: Side) -> Found:
    """A layer that changes a weight of another one in its call."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x, training=training)
        with side.part(1):
            return model.second(x, training=training)

    def make(name: str) -> Any:
        return lambda: L.SpectralNormalization(dense(name)(), name=f"spectral_{name}")

    return train(side, model_of(side, call, first=make("first"), second=make("second")), rows())


def tied_weights(side: Side) -> Found:
    """The embedding is the output's matrix, too."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.table(x)
        with side.part(1):
            x = model.body(x)
        with side.part(0):
            return tf.matmul(x, model.table.embeddings, transpose_b=True)

    tokens = tf.constant(np.random.RandomState(0).randint(0, 9, (8, 3)))
    model = model_of(
        side, call, table=lambda: L.Embedding(9, WIDTH, name="table"), body=dense("body")
    )
    return train(side, model, tokens, tf.keras.optimizers.Adam(0.05))


def siamese(side: Side) -> Found:
    """One tower for two inputs, and a distance of both."""

    def call(model: Any, x: Any, training: Any) -> Any:
        left, right = x[:, :2], x[:, 2:]
        with side.part(0):
            left, right = model.tower(left), model.tower(right)
        with side.part(1):
            return tf.norm(model.head(left) - model.head(right), axis=-1)

    return train(side, model_of(side, call, tower=dense("tower"), head=dense("head")), rows())


def preprocessing(side: Side) -> Found:
    """Adapted and looked up: tables, means, buckets, inside of the model."""
    norm = L.Normalization(name="norm")
    norm.adapt(rows(5))
    lookup = L.IntegerLookup(vocabulary=[3, 5, 7], name="lookup")
    buckets = L.Discretization(bin_boundaries=[-0.5, 0.0, 0.5], name="buckets")

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            y = model.norm(x)
            words = model.lookup(tf.cast(tf.abs(x[:, :1]) * 8.0, tf.int64))
            y = tf.concat([y, tf.cast(words, tf.float32), tf.cast(model.buckets(x), tf.float32)], 1)
        with side.part(1):
            return model.head(y)

    return train(
        side,
        model_of(
            side,
            call,
            norm=lambda: norm,
            lookup=lambda: lookup,
            buckets=lambda: buckets,
            head=dense("head"),
        ),
        rows(),
    )


def words(side: Side) -> Found:
    """Strings as input, looked up on the first half."""
    lookup = L.StringLookup(vocabulary=["a", "b", "c"], name="lookup")

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            y = model.table(model.lookup(x))
        with side.part(1):
            return model.head(y)

    batch = tf.constant([["a", "b"], ["c", "a"]] * 4)
    model = model_of(
        side,
        call,
        lookup=lambda: lookup,
        table=lambda: L.Embedding(5, WIDTH, name="table"),
        head=dense("head"),
    )
    return train(side, model, batch)


def dtypes(side: Side) -> Found:
    """Layers in other precisions, integers and complex numbers between the halves."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
            waves = tf.signal.rfft(x)
            best = tf.argmax(x, axis=-1)
            pixels = tf.cast(tf.clip_by_value(x * 100.0, 0.0, 255.0), tf.uint8)
        with side.part(1):
            y = model.second(tf.cast(tf.signal.irfft(waves), tf.float64))
            y = tf.cast(y, tf.float32) + tf.one_hot(best, WIDTH)
            return y + tf.cast(pixels, tf.float32) / 255.0

    model = model_of(side, call, first=dense("first"), second=dense("second", dtype="float64"))
    return train(side, model, rows())


def bfloat16(side: Side) -> Found:
    """Mixed precision without a scale of losses."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    policy = "mixed_bfloat16"
    model = model_of(
        side, call, first=dense("first", dtype=policy), second=dense("second", dtype=policy)
    )
    return train(side, model, rows())


def lazy_variables(side: Side) -> Found:
    """Variables of ``tf.Module``, made in the first call, beside Python with a gradient."""

    class Affine(tf.Module):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.is_built = False

        def __call__(self, x: Any) -> Any:
            if not self.is_built:
                self.w = tf.Variable(tf.ones([x.shape[-1], WIDTH]) * 0.3, name="w")
                self.b = tf.Variable(tf.zeros([WIDTH]), name="b")
                self.is_built = True
            return tf.tanh(x @ self.w + self.b)

    class Wrapping(L.Layer):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.affine = Affine(f"affine_{name}")

        def call(self, x: Any) -> Any:
            return self.affine(x)

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
            # TensorFlow keeps one tape for all calls of it.
            x = tf.ensure_shape(tf.py_function(lambda y: y * y, [x], tf.float32), x.shape)
        with side.part(1):
            return model.second(model.wrapping(x))

    model = model_of(
        side,
        call,
        first=dense("first"),
        wrapping=lambda: Wrapping("wrapping"),
        second=dense("second"),
    )
    return train(side, model, rows())


#: What gives the numbers of TensorFlow.
NAMES = (
    "masking",
    "mask_of_the_caller",
    "stateful_recurrence",
    "penalties",
    "constraints",
    # Keras 2 asks a tensor for its truth there, which fails in every tf.function.
    *(("spectral_norm",) if IS_KERAS_3 else ()),
    "tied_weights",
    "siamese",
    "preprocessing",
    "words",
    "dtypes",
    "bfloat16",
    "lazy_variables",
)
