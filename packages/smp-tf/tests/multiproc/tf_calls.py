"""Bodies that call models in ways that plain Keras takes, see ``tf_beside``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name

L = tf.keras.layers
WIDTH = 4


def rows(seed: int = 0) -> Any:
    """Returns a batch."""
    return tf.constant(np.random.RandomState(seed).standard_normal((8, WIDTH)), tf.float32)


def two_layers(side: Side, between: Any = None, after: Any = None) -> Any:
    """Returns a model of a layer on each half.

    Args:
        side: where.
        between: takes the model, the first layer's result and the arguments of the call.
        after: takes the same with the second layer's result.
    """

    class Two(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="two")
            self.first = L.Dense(WIDTH, "tanh", name="first")
            self.second = L.Dense(WIDTH, name="second")
            self.extra = L.Dense(WIDTH, "tanh", name="extra")
            self.scale = 1.0
            self.mode = "plain"

        def call(self, x: Any, **kwargs: Any) -> Any:
            with side.part(0):
                x = self.first(x["x"] if isinstance(x, dict) else x)
                if between is not None:
                    x = between(self, x, kwargs)
            with side.part(1):
                x = self.second(x)
                return x if after is None else after(self, x, kwargs)

    return Two()


class Config:
    """Something that says nothing of itself."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Config()"


class Pair(NamedTuple):
    """Two tensors."""

    left: Any
    right: Any


def arguments(side: Side) -> Found:
    """Calls that differ in names, structure and objects alone, in one step and in several."""

    def after(model: Any, x: Any, given: dict[str, Any]) -> Any:
        x = x + given.get("plus", 0.0) - given.get("minus", 0.0)
        for name, sign in (("l", 1.0), ("r", -1.0)):
            x = x + sign * given.get("parts", {}).get(name, 0.0)
        pair = given.get("pair", ())
        if isinstance(pair, Pair):
            x = x + 5.0 * pair.left
        elif isinstance(pair, list):
            x = x - pair[0]
        x = x + 2.0 if given.get("up") else x
        x = x - 7.0 if given.get("down") else x
        return x * given["config"].factor if "config" in given else x

    model = two_layers(side, after=after)
    z = rows(1)

    @side.step
    def many(x: Any, z: Any) -> Any:
        calls = [
            {"plus": z},
            {"minus": z},
            {"up": True},
            {"down": True},
            {"parts": {"l": z}},
            {"parts": {"r": z}},
            {"pair": Pair(z, z)},
            {"pair": [z, z]},
            {"config": Config(2.0)},
            {"config": Config(-3.0)},
        ]
        return [tf.reduce_sum(model(x, **given)) for given in calls]

    @side.step
    def one(x: Any, **kwargs: Any) -> Any:
        return tf.reduce_sum(model(x, **kwargs))

    found = [each.reduce_sum() for each in many(rows(), z)]
    calls = ({"up": True}, {"down": True}, {"config": Config(2.0)}, {"config": Config(-3.0)})
    return Found(found + [one(rows(), **given).reduce_sum() for given in calls], {})


def attributes(side: Side) -> Found:
    """Attributes of a model change: between step functions, and between calls in one body."""

    def after(model: Any, x: Any, given: dict[str, Any]) -> Any:
        x = x * model.scale
        return tf.sin(x) if model.mode == "sine" else x

    model = two_layers(side, after=after)

    def body(x: Any) -> Any:
        return tf.reduce_sum(model(x))

    def toggling(x: Any) -> Any:
        results = []
        for scale in (1.0, 5.0):
            model.scale = scale
            results.append(tf.reduce_sum(model(x)))
        return results

    found = [side.step(body)(rows()).reduce_sum()]
    model.scale = 3.0
    found.append(side.step(body)(rows()).reduce_sum())
    model.mode = "sine"
    found.append(side.step(body)(rows()).reduce_sum())
    found += [each.reduce_sum() for each in side.step(toggling)(rows())]
    return Found(found, {})


def _gradients(side: Side, model: Any) -> Found:
    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables), loss

    gradients, loss = compute(rows())
    values = [None if each is None else each.reduce_sum() for each in gradients]
    return Found([loss.reduce_sum()], by_name(model.trainable_variables, values))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _with_tape(x: Any) -> Any:
    def gradient(dy: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x) * x
        return tape.gradient(y, x, output_gradients=2.0 * dy)

    return tf.sin(x) * x, gradient


def recompute(side: Side) -> Found:
    """A layer computed again in the backward pass."""

    def between(model: Any, x: Any, given: dict[str, Any]) -> Any:
        model.extra.build(x.shape) if not model.extra.built else None
        return tf.recompute_grad(lambda value: model.extra(value) * value)(x)

    return _gradients(side, two_layers(side, between))


def tape_in_gradient(side: Side) -> Found:
    """A custom gradient that is computed with a tape."""
    return _gradients(side, two_layers(side, lambda model, x, given: _with_tape(x)))


def tape_in_call(side: Side) -> Found:
    """A model whose result is a derivative."""

    def between(model: Any, x: Any, given: dict[str, Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(x) * x)
        return tape.gradient(y, x)

    return _gradients(side, two_layers(side, between))
