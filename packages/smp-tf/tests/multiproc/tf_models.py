"""The models that are trained over processes and in one process alike.

Each builder takes the base class (``smp.DistributedModel`` or ``tf.keras.Model``) and the partition
context, so that the model of one process is the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

L = tf.keras.layers
Partition = Callable[[int], AbstractContextManager[None]]
BATCH = 16


class Problem(NamedTuple):
    """A model with data and a loss.

    Attributes:
        model: to be trained.
        batch: features and targets, numpy arrays or structures of them.
        loss: takes targets and outputs.
        is_random: dropout is active, so that only runs of the library are comparable.
    """

    model: Any
    batch: tuple[Any, Any]
    loss: Callable[[Any, Any], Any]
    is_random: bool = False


def _labels(targets: Any, outputs: Any) -> Any:
    crossentropy = tf.keras.losses.sparse_categorical_crossentropy
    return tf.reduce_mean(crossentropy(targets, outputs, from_logits=True))


def _squares(targets: Any, outputs: Any) -> Any:
    return tf.reduce_mean(tf.square(targets - outputs))


def _data(*shape: int) -> Any:
    return np.random.RandomState(0).standard_normal((BATCH, *shape)).astype("float32")


def _classes(count: int, *shape: int) -> Any:
    return np.random.RandomState(1).randint(0, count, (BATCH, *shape))


def cnn(base: Any, part: Partition) -> Problem:
    class CNN(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="cnn")
            self.first = L.Conv2D(8, 3, activation="relu", padding="same")
            self.norm = L.BatchNormalization()
            self.second = L.Conv2D(8, 3, activation="relu", padding="same", strides=2)
            self.other_norm = L.BatchNormalization()
            self.flat, self.hidden, self.out = L.Flatten(), L.Dense(16, "relu"), L.Dense(10)

        def call(self, x: Any, training: Any = None) -> Any:
            with part(0):
                x = self.norm(self.first(x), training=training)
            with part(1):
                x = self.other_norm(self.second(x), training=training)
                return self.out(self.hidden(self.flat(x)))

    return Problem(CNN(), (_data(8, 8, 1), _classes(10)), _labels)


def dropout(base: Any, part: Partition) -> Problem:
    class Dropout(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="dropout")
            self.layers_ = [L.Dense(16, "tanh", name=f"dense_{i}") for i in range(4)]
            self.drops = [L.Dropout(0.4, seed=i, name=f"drop_{i}") for i in range(4)]

        def call(self, x: Any, training: Any = None) -> Any:
            for i, (layer, drop) in enumerate(zip(self.layers_, self.drops, strict=True)):
                with part(i // 2):
                    x = drop(layer(x), training=training)
            return x

    return Problem(Dropout(), (_data(8), _classes(16)), _labels, is_random=True)


class Block(L.Layer):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = L.MultiHeadAttention(heads, width // heads)
        self.norms = [L.LayerNormalization(name=f"norm_{i}") for i in range(2)]
        self.wide, self.narrow = L.Dense(4 * width, "gelu"), L.Dense(width)

    def build(self, input_shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


def transformer(base: Any, part: Partition) -> Problem:
    class Transformer(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="transformer")
            self.embedding = L.Embedding(20, 16)
            self.blocks = [Block(16, 2, name=f"block_{i}") for i in range(2)]
            self.norm, self.head = L.LayerNormalization(), L.Dense(20)

        def call(self, tokens: Any) -> Any:
            with part(0):
                x = self.blocks[0](self.embedding(tokens))
            with part(1):
                return self.head(self.norm(self.blocks[1](x)))

    return Problem(Transformer(), (_classes(20, 6), _classes(20, 6)), _labels)


def lstm(base: Any, part: Partition) -> Problem:
    class Recurrent(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="recurrent")
            self.first = L.LSTM(8, return_sequences=True)
            self.second, self.head = L.GRU(8), L.Dense(3)

        def call(self, x: Any) -> Any:
            with part(0):
                x = self.first(x)
            with part(1):
                return self.head(self.second(x))

    return Problem(Recurrent(), (_data(5, 4), _classes(3)), _labels)


def zigzag(base: Any, part: Partition) -> Problem:
    """Placed 0-1-0-1, with skips."""

    class Zigzag(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="zigzag")
            self.steps = [L.Dense(8, "tanh", name=f"step_{i}") for i in range(4)]

        def call(self, x: Any) -> Any:
            with part(0):
                a = self.steps[0](x)
            with part(1):
                b = self.steps[1](a)
            with part(0):
                c = self.steps[2](b) + a
            with part(1):
                return self.steps[3](c) + b

    return Problem(Zigzag(), (_data(8), _data(8)), _squares)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _doubled_gradient(x: Any) -> Any:
    return x * x, lambda dy: 4.0 * x * dy


def control_flow(base: Any, part: Partition) -> Problem:
    class ControlFlow(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="control_flow")
            self.first, self.second, self.third = L.Dense(8, "swish"), L.Dense(8), L.Dense(3)

        def call(self, x: Any) -> Any:
            with part(0):
                x = self.first(x)
                _, x = tf.while_loop(
                    lambda i, h: i < 3,
                    lambda i, h: (i + 1, tf.tanh(h * 1.1)),
                    [tf.constant(0), x],
                )
            with part(1):
                x = _doubled_gradient(self.second(x))
                x = tf.cond(tf.reduce_sum(x) > 1.0, lambda: tf.sin(x), lambda: x * 2.0)
                x = tf.function(lambda z: tf.cos(z) * z)(x)
                with part(0):
                    return self.third(x)

    return Problem(ControlFlow(), (_data(5), _classes(3)), _labels)


def inputs_and_outputs(base: Any, part: Partition) -> Problem:
    """A dict of inputs, several outputs, one of them of integers; a loss of both outputs."""

    class Several(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="several")
            self.left, self.right = L.Dense(8, "relu"), L.Dense(8, "tanh")
            self.heads = [L.Dense(3, name="head_0"), L.Dense(1, name="head_1")]

        def call(self, inputs: Any) -> Any:
            with part(0):
                left = self.left(inputs["a"])
                score = self.heads[1](left)
            with part(1):
                both = self.right(inputs["b"]) + left
                logits = self.heads[0](both)
            return {"logits": logits, "score": score, "class": tf.argmax(logits, axis=-1)}

    def loss(targets: Any, outputs: Any) -> Any:
        weight = tf.reduce_mean(tf.sigmoid(outputs["score"]))
        chosen = tf.reduce_mean(tf.cast(outputs["class"], tf.float32))
        return _labels(targets, outputs["logits"]) * weight + 0.1 * chosen

    return Problem(Several(), ({"a": _data(4), "b": _data(6)}, _classes(3)), loss)


def layer_losses(base: Any, part: Partition) -> Problem:
    class Regularized(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="regularized")
            penalty = tf.keras.regularizers.L2(0.01)
            self.first = L.Dense(8, "tanh", kernel_regularizer=penalty)
            self.second = L.Dense(3, kernel_regularizer=penalty, activity_regularizer=penalty)

        def call(self, x: Any) -> Any:
            with part(0):
                x = self.first(x)
            with part(1):
                return self.second(x)

    problem = Problem(Regularized(), (_data(5), _classes(3)), _labels)
    model = problem.model
    return problem._replace(loss=lambda y, p: _labels(y, p) + tf.add_n(model.losses))


def shared_layer(base: Any, part: Partition) -> Problem:
    """One layer on both ends, and a variable of the model itself."""

    class Shared(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="shared")
            self.table, self.middle = L.Embedding(12, 8), L.Dense(8, "tanh")

        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(8,), initializer="ones")
            self.built = True

        def call(self, tokens: Any) -> Any:
            with part(0):
                x = self.table(tokens) * self.scale
            with part(1):
                x = self.middle(x)
            with part(0):
                return tf.matmul(x, self.table.embeddings, transpose_b=True)

    return Problem(Shared(), (_classes(12, 4), _classes(12, 4)), _labels)


def sequential(base: Any, part: Partition) -> Problem:
    layers = [L.Dense(12, "relu"), L.Dense(12, "relu"), L.Dense(12, "relu"), L.Dense(3)]
    return Problem(_given(base, tf.keras.Sequential(layers)), (_data(5), _classes(3)), _labels)


def functional(base: Any, part: Partition) -> Problem:
    """Variables exist before the model is wrapped."""
    inputs = tf.keras.Input((6,))
    x = L.Dense(12, "relu")(inputs)
    y = L.Dense(12, "relu")(x)
    outputs = L.Dense(3)(L.Concatenate()([x, L.LayerNormalization()(y)]))
    model = tf.keras.Model(inputs, outputs)
    return Problem(_given(base, model), (_data(6), _classes(3)), _labels)


def mobilenet(base: Any, part: Partition) -> Problem:
    model = tf.keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, weights=None, classes=10, dropout=0.0, classifier_activation=None
    )
    return Problem(_given(base, model), (_data(32, 32, 3), _classes(10)), _labels)


def _given(base: Any, model: Any) -> Any:
    return model if base is tf.keras.Model else base(model)


PROBLEMS = {
    function.__name__: function
    for function in (
        cnn,
        dropout,
        transformer,
        lstm,
        zigzag,
        control_flow,
        inputs_and_outputs,
        layer_losses,
        shared_layer,
        sequential,
        functional,
        mobilenet,
    )
}
