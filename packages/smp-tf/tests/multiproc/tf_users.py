"""What scripts of users begin with, see ``tf_beside`` for what a body is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH

L = tf.keras.layers
IS_KERAS_3 = hasattr(tf.keras, "Variable")


def model_of(side: Side, call: Any, **layers: Any) -> Any:
    """Returns a subclassed model.

    Args:
        side: where.
        call: takes the model, the input, and whether it trains.
        layers: attributes of the model, made by functions.
    """

    class Model(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="model")
            for name, make in layers.items():
                setattr(self, name, make())

        def call(self, x: Any, training: Any = None) -> Any:
            return call(self, x, training)

    return Model()


def dense(name: str, width: int = WIDTH, activation: Any = "tanh", **options: Any) -> Any:
    return lambda: L.Dense(width, activation, name=name, **options)


def class_of_halves(side: Side, width: int = WIDTH, activation: Any = "tanh") -> Any:
    """Returns a class of models of a layer on each half, the second one of a width."""

    class Halves(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="model")
            self.first, self.second = dense("first")(), dense("second", width, activation)()

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                x = self.first(x)
            with side.part(1):
                return self.second(x)

    return Halves


def of_layers(side: Side, *layers: Any) -> Any:
    """Returns a model of layers one after the other, half of them on each half."""

    def call(model: Any, x: Any, training: Any) -> Any:
        middle = len(layers) // 2
        with side.part(0):
            for layer in layers[:middle]:
                x = layer(x)
        with side.part(1):
            for layer in layers[middle:]:
                x = layer(x)
            return x

    return model_of(side, call, all=lambda: list(layers))


def two_halves(side: Side, width: int = WIDTH, activation: Any = "tanh") -> Any:
    """Returns a model of a layer on each half, the second one of a width."""

    return class_of_halves(side, width, activation)()


def apply(optimizer: Any, model: Any, means: Any) -> None:
    """Updates a model by its gradients."""
    optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))


def train(
    side: Side,
    model: Any,
    batch: Any,
    optimizer: Any = None,
    loss_of: Any = None,
    steps: int = 3,
    after: Any = lambda: None,
) -> Found:
    """Trains; returns losses, and the trainable variables after it."""
    optimizer = optimizer or tf.keras.optimizers.SGD(0.1)
    loss_of = loss_of or (lambda y: tf.reduce_mean(tf.square(tf.cast(y, tf.float32) - 0.3)))

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = loss_of(y)
            if model.losses:
                loss += tf.add_n([tf.cast(each, loss.dtype) for each in model.losses])
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for _ in range(steps):
        gradients, loss = compute(batch)
        means = [None if each is None else each.accumulate() for each in gradients]
        pairs = zip(means, model.trainable_variables, strict=True)
        optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
        losses.append(loss.reduce_mean())
        after()
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))
