"""Bodies that ask for gradients of other things than the model's variables, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows, two_layers

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.parameters.variables import home_of

L = tf.keras.layers


def _summed(values: Any) -> Any:
    return [None if each is None else each.reduce_sum() for each in values]


def of_inputs(side: Side) -> Found:
    """Of an input that the tape watches, of one made of it, and of one in a dict."""
    model = two_layers(side)

    @side.step
    def compute(x: Any, z: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, z])
            loss = tf.reduce_sum(tf.square(model(x))) + tf.reduce_sum(model({"x": tf.sin(z)}))
        return tape.gradient(loss, [x, z])

    return Found([each.merge() for each in compute(rows(), rows(1))], {})


def without_tape(side: Side) -> Found:
    """``tf.gradients`` of an input."""
    model = two_layers(side)

    @side.step
    def compute(x: Any) -> Any:
        (gradient,) = tf.gradients(tf.reduce_sum(tf.square(model(x))), x)
        return gradient

    return Found([compute(rows()).merge()], {})


def of_others(side: Side) -> Found:
    """Of variables outside the model, however they are read."""
    model = two_layers(side)
    tables = [tf.Variable(rows(place), name=f"table_{place}") for place in range(4)]
    read = tf.function(lambda: tables[2] * 2.0)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            x = x[:2] + tf.gather_nd(tables[0], [[0], [1]]) + tf.gather(tables[1], [2, 3])
            x = x + read()[:2]
            x = x + tf.cond(
                tf.reduce_sum(x) > 1e6, lambda: tf.zeros([2, WIDTH]), lambda: tables[3][:2]
            )
            loss = tf.reduce_sum(tf.square(model(x)))
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, tables)]

    return Found(_summed(compute(rows())), {})


def of_a_variable_in_the_call(side: Side) -> Found:
    """Of variables that are not the model's but are read by its call, one of which it changes."""
    gain, count = tf.Variable(3.0), tf.Variable(0.0, trainable=False)

    def after(model: Any, x: Any, given: Any) -> Any:
        count.assign_add(1.0)
        return x * gain

    model = two_layers(side, lambda model, x, given: x * gain, after)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        return tape.gradient(loss, gain)

    gradient = compute(rows()).reduce_sum()
    assert (home_of(count) is None) is (side.base is tf.keras.Model)
    return Found([gradient, tf.convert_to_tensor(count)], {})


def of_a_variable_given(side: Side) -> Found:
    """Of a variable that the model is called with."""
    model = two_layers(side, after=lambda model, x, given: x * given["gain"])
    gain = tf.Variable(3.0)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, gain=gain)))
        return tape.gradient(loss, gain)

    return Found([compute(rows()).reduce_sum()], {})


def of_one_output(side: Side) -> Found:
    """What a loss does not depend on has no gradient: None, not zeros."""

    class Heads(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="heads")
            self.body = L.Dense(WIDTH, "tanh", name="body")
            self.heads = [L.Dense(2, name=f"head_{place}") for place in range(3)]

        def call(self, x: Any) -> Any:
            with side.part(0):
                x = self.body(x)
                first = self.heads[0](x)
            with side.part(1):
                return first, self.heads[1](x), self.heads[2](x)

    model = Heads()
    own: dict[str, Any] = {}
    for count in (1, 2):

        @side.step
        def compute(x: Any, count: int = count) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.square(each)) for each in model(x)[:count]])
            return tape.gradient(loss, model.trainable_variables)

        gradients = compute(rows())
        found = by_name(model.trainable_variables, gradients)
        own |= {f"{count} {name}": each.reduce_sum() for name, each in found.items()}
    return Found(_with_a_spare_half(side, own), own)


def _with_a_spare_half(side: Side, own: dict[str, Any]) -> list[Any]:
    """Trains a model of which one half has no gradients, by optimizers that know of all processes.

    Adds its weights by name; returns what optimizers count.
    """

    class Spare(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="spare")
            self.first, self.second = L.Dense(WIDTH, name="first"), L.Dense(WIDTH, name="second")

        def call(self, x: Any) -> Any:
            with side.part(0):
                x = self.first(x)
            with side.part(1):
                self.second(x)
            return x

    model = Spare()

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables)

    def given(factor: float) -> Any:
        pairs = zip(compute(rows()), model.trainable_variables, strict=True)
        return [(factor * each.accumulate(), one) for each, one in pairs if each is not None]

    kinds = keras.optimizer_kinds("SGD")
    for optimizer in (kind(0.01, global_clipnorm=1.0) for kind in kinds):
        optimizer.apply_gradients(given(1.0))
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.01), initial_scale=8.0, dynamic_growth_steps=2
    )
    keras.build_optimizer(scaling, model.trainable_variables)
    found = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        scaling.apply_gradients(given(factor))
        scale = scaling.dynamic_scale if keras.IS_KERAS_3 else scaling.loss_scale
        found += [tf.convert_to_tensor(each) for each in (scale, scaling.iterations)]
    own |= by_name(model.trainable_variables, model.trainable_variables)
    return found


def of_tangents(side: Side) -> None:
    """Derivatives that go forward are refused."""
    model = two_layers(side)

    def forward(x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = model(x)
        return accumulator.jvp(y)

    with pytest.raises(SMPError, match="do not go forward"):
        side.step(forward)(rows())


def outside(side: Side, is_compiled: bool) -> Found:
    """A tape around the step function."""
    model = two_layers(side)
    step = side.step(lambda x: tf.reduce_sum(tf.square(model(x))))
    step(rows())  # variables of other ranks are known from here on

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = step(x).reduce_sum()
        return tape.gradient(loss, [x, model.trainable_variables])

    of_x, of_variables = (tf.function(train) if is_compiled else train)(rows())
    return Found([of_x], by_name(model.trainable_variables, of_variables))
