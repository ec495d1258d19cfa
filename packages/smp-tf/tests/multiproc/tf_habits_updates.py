"""Habits of scripts with optimizers and averages of weights, see ``tf_habits``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side
from tf_calls import rows
from tf_habits import (
    classify,
    computing,
    ended,
    labels,
    loop,
    means,
    names_of,
    square,
    update,
)
from tf_users import IS_KERAS_3, two_halves

L = tf.keras.layers


def sharpness_adaptive(side: Side) -> Found:
    """ASAM: a step up by weights' sizes, in one ``tf.function`` with both passes."""
    model, optimizer = two_halves(side, 3, None), tf.keras.optimizers.SGD(0.1)
    compute = computing(side, model, classify)
    compute(rows(), labels())

    def train(x: Any, y: Any) -> Any:
        gradients, loss = compute(x, y)
        pairs = list(zip(means(gradients), model.trainable_variables, strict=True))
        norm = tf.linalg.global_norm([tf.abs(v) * g for g, v in pairs])
        moves = [tf.square(v) * g * 0.5 / (norm + 1e-12) for g, v in pairs]
        for move, (_, variable) in zip(moves, pairs, strict=True):
            variable.assign_add(move)
        gradients, there = compute(x, y)
        for move, (_, variable) in zip(moves, pairs, strict=True):
            variable.assign_sub(move)
        update(optimizer, means(gradients), model.trainable_variables)
        return loss.reduce_mean(), there.reduce_mean()

    if side.base is not tf.keras.Model:
        train = tf.function(train)
    return ended([train(rows(number), labels(number)) for number in range(3)], model)


class _Lars(tf.keras.optimizers.Optimizer):  # type: ignore[misc]
    """Rates of layers by the norms of weights and gradients."""

    def __init__(self, rate: float) -> None:
        super().__init__(learning_rate=rate, name="lars")

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.speeds = [
            self.add_variable_from_reference(each, name="speed")
            if IS_KERAS_3
            else self.add_variable_from_reference(each, "speed")
            for each in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any = None) -> None:
        speed = self.speeds[self._get_variable_index(variable)]
        weight, slope = tf.norm(tf.convert_to_tensor(variable)), tf.norm(gradient)
        trust = tf.where(slope > 0.0, 0.1 * weight / (slope + 1e-4 * weight + 1e-9), 1.0)
        speed.assign(0.9 * speed + learning_rate * trust * gradient)
        variable.assign_sub(tf.convert_to_tensor(speed))


def optimizer_by_layers(side: Side) -> Found:
    """LARS as one's own optimizer."""
    return loop(side, two_halves(side), square, [(rows(n),) for n in range(3)], _Lars(0.5))


class _Normed(tf.keras.optimizers.SGD):  # type: ignore[misc]
    """Gradients divided by the norm of all, in ``apply_gradients``."""

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        gradients, variables = zip(*list(grads_and_vars), strict=True)
        norm = tf.linalg.global_norm(gradients)
        self.last_norm = norm
        return super().apply_gradients(
            [(g / (norm + 1e-8), v) for g, v in zip(gradients, variables, strict=True)]
        )


def optimizer_by_the_norm(side: Side) -> Found:
    """Normalized descent as a subclass, whose last norm the script reads."""
    model, optimizer, same = two_halves(side), _Normed(0.05), []
    compute = computing(side, model)
    for number in range(3):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        same += [loss.reduce_mean(), float(optimizer.last_norm)]
    return ended(same, model)


class _Centred(tf.keras.optimizers.RMSprop):  # type: ignore[misc]
    """Gradient centralization in ``apply``."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        def centred(each: Any) -> Any:
            axes = list(range(len(each.shape) - 1))
            return each - tf.reduce_mean(each, axes, keepdims=True) if axes else each

        return super().apply([centred(each) for each in grads], trainable_variables)


def optimizer_centred(side: Side) -> Found:
    """Centralized gradients, with clipped weights after each update."""
    model, optimizer, same = two_halves(side), _Centred(0.05), []
    compute = computing(side, model)
    for number in range(3):
        gradients, loss = compute(rows(number))
        optimizer.apply(means(gradients), model.trainable_variables)
        for each in model.trainable_variables:
            each.assign(tf.clip_by_value(each, -0.4, 0.4))
        same.append(loss.reduce_mean())
    return ended(same, model)


class _Lookahead:
    """Wraps an optimizer: slow weights are variables."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.slow, self.count = inner, None, tf.Variable(0)

    def apply_gradients(self, pairs: Any) -> None:
        pairs = list(pairs)
        if self.slow is None:
            self.slow = [tf.Variable(v, trainable=False) for _, v in pairs]
        self.inner.apply_gradients(pairs)
        self.count.assign_add(1)
        if self.count % 2 == 0:
            for slow, (_, fast) in zip(self.slow, pairs, strict=True):
                slow.assign_add(0.5 * (fast - slow))
                fast.assign(slow)


def lookahead_wrapped(side: Side) -> Found:
    """Lookahead around an optimizer, counted in a variable."""
    wrapping = _Lookahead(tf.keras.optimizers.Adam(0.05))
    return loop(side, two_halves(side), square, [(rows(n),) for n in range(4)], wrapping)


def average_by_a_class(side: Side) -> Found:
    """Weights swapped for their averages to evaluate, and back."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.3), []
    compute, evaluate = computing(side, model), side.step(lambda x: square(model, x))
    shadow: dict[str, Any] = {}
    for number in range(3):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        for each in model.trainable_variables:
            key = each.path if IS_KERAS_3 else each.name
            old = shadow.get(key, tf.convert_to_tensor(each))
            shadow[key] = 0.7 * old + 0.3 * tf.convert_to_tensor(each)
        kept = [tf.identity(each) for each in model.trainable_variables]
        for each in model.trainable_variables:
            each.assign(shadow[each.path if IS_KERAS_3 else each.name])
        same += [loss.reduce_mean(), evaluate(rows(9)).reduce_mean()]
        for each, value in zip(model.trainable_variables, kept, strict=True):
            each.assign(value)
    return ended(same, model)


def average_of_tensorflow(side: Side) -> Found:
    """``tf.train.ExponentialMovingAverage``, which asks variables whether they have a value."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []
    compute, averages = computing(side, model), tf.train.ExponentialMovingAverage(0.5)
    compute(rows())
    variables = [each.value if IS_KERAS_3 else each for each in model.trainable_variables]
    for number in range(3):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        averages.apply(variables)
        same.append(loss.reduce_mean())
    return ended([*same, *(averages.average(each) + 0.0 for each in variables)], model)


def averaged_at_the_end(side: Side) -> Found:
    """SWA: running means of ``get_weights`` by NumPy, set at the end."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.3), []
    compute, mean = computing(side, model), []
    for number in range(4):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        if number >= 2:
            now, count = model.get_weights(), number - 1
            mean = [m + (w - m) / count for m, w in zip(mean or now, now, strict=True)]
        same.append(loss.reduce_mean())
    model.set_weights(mean)
    return ended([*same, compute(rows(9))[1].reduce_mean()], model)


def accumulated_in_variables(side: Side) -> Found:
    """Sums of gradients in variables made from weights, applied each second batch."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.Adam(0.05), []
    compute, sums = computing(side, model), []
    for number in range(4):
        gradients, loss = compute(rows(number))
        found = means(gradients)
        if not sums:
            sums = [tf.Variable(tf.zeros_like(each)) for each in model.trainable_variables]
        for total, each in zip(sums, found, strict=True):
            total.assign_add(each / 2.0)
        if number % 2:
            optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
            for total in sums:
                total.assign(tf.zeros_like(total))
        same.append(loss.reduce_mean())
    return ended(same, model)


def rates_of_layers(side: Side) -> Found:
    """Gradients scaled by the depth of their layer, and two optimizers by name."""
    model, same = two_halves(side), []
    kernels, biases = tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.Adam(0.01)
    compute = computing(side, model)
    for number in range(3):
        gradients, loss = compute(rows(number))
        pairs = list(zip(means(gradients), model.trainable_variables, strict=True))
        first = {id(each) for each in model.first.trainable_variables}
        pairs = [(g * (0.1 if id(v) in first else 1.0), v) for g, v in pairs]
        kernels.apply_gradients([pair for pair in pairs if "kernel" in pair[1].name])
        biases.apply_gradients([pair for pair in pairs if "bias" in pair[1].name])
        same.append(loss.reduce_mean())
    return ended(same, model)


def scaled_by_hand(side: Side) -> Found:
    """A loss scale that doubles and halves, steps left out where a gradient is infinite."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []
    scale = tf.Variable(2.0**126, trainable=False)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = 9.0 * square(model, x)
            scaled = loss * scale
        return tape.gradient(scaled, model.trainable_variables), loss

    for number in range(4):
        gradients, loss = compute(rows(number))
        found = [each / scale for each in means(gradients)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in found])
        if finite:
            update(optimizer, found, model.trainable_variables)
            scale.assign(scale * 2.0)
        else:
            scale.assign(scale / 2.0**8)
        same += [loss.reduce_mean(), scale + 0.0, finite]
    return ended(same, model)


def pruned(side: Side) -> Found:
    """Weights below a quantile of all are zero, and stay so by masks."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []
    compute = computing(side, model)
    compute(rows())
    sizes = [np.abs(each.numpy()).ravel() for each in model.trainable_variables]
    least = np.quantile(np.concatenate(sizes), 0.3)
    masks = [tf.cast(tf.abs(each) > least, tf.float32) for each in model.trainable_variables]
    for number in range(3):
        gradients, loss = compute(rows(number))
        found = [each * mask for each, mask in zip(means(gradients), masks, strict=True)]
        update(optimizer, found, model.trainable_variables)
        for each, mask in zip(model.trainable_variables, masks, strict=True):
            each.assign(each * mask)
        same.append(loss.reduce_mean())
    return ended([*same, sum(float(tf.reduce_sum(mask)) for mask in masks)], model)


def optimizer_put_back(side: Side) -> Found:
    """Weights and an optimizer's variables as arrays, a step, and all of them back."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.Adam(0.05), []
    compute, kept, weights = computing(side, model), [], []
    for number in range(4):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        state = optimizer.variables if IS_KERAS_3 else optimizer.variables()
        if number == 1:
            kept, weights = [np.asarray(each) for each in state], model.get_weights()
        if number == 2:
            for each, value in zip(state, kept, strict=True):
                each.assign(value)
            model.set_weights(weights)
        same.append(loss.reduce_mean())
    return ended(same, model)


NAMES = names_of(globals(), "optimizer_by_layers", "optimizer_centred")
