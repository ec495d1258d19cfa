"""Layers that the first call of a model leaves out, see ``tf_beside``.

A generated population: what a layer keeps x where it is x by which call it is used first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import IS_KERAS_3, dense, model_of

L = tf.keras.layers


def _built(layer: Any) -> Any:
    layer.build((None, WIDTH))
    return layer


class _Counting(L.Layer):  # type: ignore[misc]
    """Counts its calls, and multiplies by them."""

    def __init__(self) -> None:
        super().__init__(name="extra")
        self.calls = self.add_weight(name="calls", shape=(), initializer="ones", trainable=False)

    def call(self, x: Any, training: Any = None) -> Any:
        return x * self.calls.assign_add(1.0)


LAYERS: dict[str, Callable[[], Any]] = {
    # Keras 2 draws from TensorFlow's generator, of which the library makes other numbers.
    **({"seeds": lambda: L.Dropout(0.5, seed=3, name="extra")} if IS_KERAS_3 else {}),
    "weights": lambda: _built(L.Dense(WIDTH, "tanh", name="extra")),
    "weights made later": lambda: L.Dense(WIDTH, "tanh", name="extra"),
    "moments": lambda: _built(L.BatchNormalization(momentum=0.5, name="extra")),
    "count": _Counting,
}
ALL = list(itertools.product(LAYERS, (0, 1), ("an evaluation", "a training")))


def train(side: Side, kept: str, half: int, first: str) -> Found:
    """Trains with a layer that calls before it left out."""
    uses = {"extra": False}

    def extra(model: Any, x: Any, training: Any, here: int) -> Any:
        with side.part(half):
            return model.extra(x, training=training) if here == half and uses["extra"] else x

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        x = extra(model, x, training, 0)
        with side.part(1):
            x = model.second(x)
        return extra(model, x, training, 1)

    layers = {"first": dense("first"), "extra": LAYERS[kept], "second": dense("second")}
    model, optimizer = model_of(side, call, **layers), tf.keras.optimizers.SGD(0.1)
    same: list[Any] = []

    def step_of() -> Any:
        @side.step
        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
            return tape.gradient(loss, model.trainable_variables), loss

        return compute

    def update(compute: Any, number: int) -> None:
        gradients, loss = compute(rows(number))
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients([(g.accumulate(), v) for g, v in pairs if g is not None])
        same.append(loss.reduce_mean())

    if first == "an evaluation":
        same.append(side.step(lambda x: model(x, training=False))(rows()).merge())
    else:
        update(step_of(), 0)
    uses["extra"] = True
    optimizer = tf.keras.optimizers.SGD(0.1)
    compute = step_of()
    for number in range(1, 4):
        update(compute, number)
    return Found(same, by_name(model.variables, model.variables))
