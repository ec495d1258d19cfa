"""Numbers of all weights, or of all gradients, as scripts compute them, see ``tf_beside``.

A population: each way to make one number of many x weights, gradients and both x each moment of a
training step x models of which processes have many variables, one, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import IS_KERAS_3, model_of

L = tf.keras.layers
Values = Sequence[Any]


def _flat(values: Values) -> Any:
    return tf.concat([tf.reshape(each, [-1]) for each in values], 0)


def _looped(values: Values, start: Any) -> Any:
    total = start
    for each in values:
        total += tf.reduce_sum(tf.square(each))
    return total


def _greatest(values: Values) -> Any:
    found = tf.reduce_max(values[0])
    for each in values[1:]:
        found = tf.maximum(found, tf.reduce_max(each))
    return found


def _clipped(values: Values, _: Any) -> Any:
    clipped, norm = tf.clip_by_global_norm(list(values), 0.5)
    return tf.linalg.global_norm(clipped) + norm


#: Each takes values, and a number that all processes have.
WAYS: dict[str, Callable[[Values, Any], Any]] = {
    "global norm": lambda values, _: tf.linalg.global_norm(list(values)),
    "clipped": _clipped,
    "norm of norms": lambda values, _: tf.norm(tf.stack([tf.norm(each) for each in values])),
    "norm of a list": lambda values, _: tf.norm([tf.norm(each) for each in values]),
    "add_n": lambda values, _: tf.add_n([tf.nn.l2_loss(each) for each in values]),
    "add_n of terms": lambda values, c: tf.add_n([tf.reduce_sum(each**2) * c for each in values]),
    "add_n with more": lambda values, c: tf.add_n([c, *(tf.reduce_sum(v**2) for v in values)]),
    "reduce_sum": lambda values, _: tf.reduce_sum([tf.reduce_sum(tf.abs(v)) for v in values]),
    "sum": lambda values, _: sum(tf.reduce_sum(each**2) for each in values),
    "from zero": lambda values, _: _looped(values, 0.0),
    "from a number": lambda values, _: tf.sqrt(_looped(values, tf.constant(1e-2))),
    "from a loss": lambda values, c: _looped(values, c),
    "greatest": lambda values, _: tf.reduce_max(tf.stack([tf.reduce_max(v) for v in values])),
    "greatest in a loop": lambda values, _: _greatest(values),
    "least": lambda values, _: tf.reduce_min(tf.stack([tf.norm(v) for v in values])),
    "mean": lambda values, _: tf.reduce_mean(tf.stack([tf.norm(v) for v in values])),
    "finite": lambda values, _: tf.cast(
        tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(v)) for v in values])), tf.float32
    ),
    "norm of all numbers": lambda values, _: tf.norm(_flat(values)),
    "product with itself": lambda values, _: tf.reduce_sum(_flat(values) * tf.sign(_flat(values))),
}


def _model(side: Side, kind: str) -> Any:
    """Returns a model of which processes have several variables, one of two has one, or none."""
    has_bias = kind != "one"

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = tf.tanh(model.first(x)) if kind == "none" else model.first(x)
            if kind == "slices":
                x = x + model.table(tf.argmax(x, -1))
        with side.part(1):
            return tf.tanh(x) * 2.0 if kind == "none" else model.second(x)

    layers: dict[str, Any] = {
        "first": lambda: L.Dense(WIDTH, "tanh", name="first"),
        "second": lambda: L.Dense(WIDTH, use_bias=has_bias, name="second"),
    }
    if kind == "slices":
        layers["table"] = lambda: L.Embedding(WIDTH, WIDTH, name="table")
    if kind == "none":
        del layers["second"]
    return model_of(side, call, **layers)


def _values(what: str, gradients: Values, weights: Values) -> Values:
    if what == "gradients":
        return gradients
    weights = [tf.convert_to_tensor(each) for each in weights]
    if what == "weights":
        return weights
    return [tf.convert_to_tensor(g) + 0.1 * w for g, w in zip(gradients, weights, strict=True)]


def _numbers(what: str, gradients: Values, weights: Values, loss: Any) -> dict[str, Any]:
    values = _values(what, gradients, weights)
    return {
        name: way([tf.convert_to_tensor(v) for v in values], loss) for name, way in WAYS.items()
    }


def train(side: Side, kind: str, what: str, when: str) -> Found:
    """Trains for two steps, by gradients that are divided by all numbers together."""
    model = _model(side, kind)
    is_plain = side.base is tf.keras.Model
    found: list[Any] = []

    def number(gradients: Values, loss: Any) -> Any:
        numbers = _numbers(what, gradients, model.trainable_variables, tf.stop_gradient(loss))
        return numbers, tf.add_n([tf.abs(each) for each in numbers.values()]) / 100.0 + 1.0

    class Dividing(tf.keras.optimizers.SGD):  # type: ignore[misc]
        loss = 0.0

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            pairs = list(zip(grads, trainable_variables, strict=True))
            values = _values(what, [g for g, _ in pairs], [v for _, v in pairs])
            by = tf.linalg.global_norm(list(values)) + sum(tf.reduce_sum(v**2) for v in values)
            return super().apply([g / (1.0 + by) for g, _ in pairs], trainable_variables)

    in_optimizer = when == "optimizer" and IS_KERAS_3
    optimizer = (Dividing if in_optimizer else tf.keras.optimizers.SGD)(0.3)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
        gradients = tape.gradient(loss, model.trainable_variables)
        if when != "body":
            return gradients, loss, {}
        numbers, by = number(gradients, loss)
        return [tf.convert_to_tensor(each) / by for each in gradients], loss, numbers

    def update(x: Any) -> Any:
        gradients, loss, numbers = compute(x)
        means = [tf.convert_to_tensor(each.accumulate()) for each in gradients]
        numbers = {name: each.reduce_mean() for name, each in numbers.items()}
        if when in ("outside", "function"):
            numbers, by = number(means, loss.reduce_mean())
            means = [each / by for each in means]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean(), numbers

    if when == "function" and not is_plain:
        update = tf.function(update)
    for place in range(2):
        found.append(update(rows(place)))
    return Found(found, by_name(model.trainable_variables, model.trainable_variables))


def penalized(side: Side, kind: str, name: str) -> Found:
    """Trains by a loss with a number of all weights in it, and tells that loss."""
    model = _model(side, kind)
    optimizer = tf.keras.optimizers.SGD(0.3)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
            weights = [tf.convert_to_tensor(each) for each in model.trainable_variables]
            loss += 0.1 * WAYS[name](weights, tf.constant(0.5))
        return tape.gradient(loss, model.trainable_variables), loss

    found = []
    for place in range(2):
        gradients, loss = compute(rows(place))
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        found.append(loss.reduce_mean())
    return Found(found, by_name(model.trainable_variables, model.trainable_variables))


KINDS = ("several", "one", "none", "slices")
WHATS = ("gradients", "weights", "both")
MOMENTS = ("body", "outside", "function", "optimizer")
ALL = tuple(itertools.product(KINDS, WHATS, MOMENTS))
#: Sums of which the gradient is known on each process.
PENALTIES = tuple(name for name in WAYS if name not in ("finite", "clipped"))


def _kernels(values: Values) -> Values:
    return [each for each in values if each.shape.rank == 2]


def _metric(values: Values) -> Any:
    metric = tf.keras.metrics.Mean()
    for each in values:
        metric.update_state(tf.norm(each))
    return metric.result()


def _in_a_variable(values: Values) -> Any:
    """Returns what a variable of the script's own has after each write."""
    kept, found = tf.Variable(0.0), []
    for write in (kept.assign_add, kept.assign):
        for each in values:
            write(tf.norm(each))
            found.append(kept.read_value())
    return found


def _gradients_of(number: Callable[[Values], Any]) -> Callable[[Values], Any]:
    """Returns what differentiates a number of the kernels."""

    def gradients(values: Values) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            total = number([tf.nn.l2_loss(each) for each in _kernels(values)])
        return [each for each in tape.gradient(total, values) if each is not None]

    return gradients


#: Each takes values, of which processes have some.
OF_SOME: dict[str, Callable[[Values], Any]] = {
    "some": lambda values: values[0] / sum(tf.reduce_sum(v**2) for v in _kernels(values)),
    "some are told": lambda values: float(tf.linalg.global_norm(_kernels(values))),
    "one is told": lambda values: float(tf.add_n([tf.norm(v) for v in _kernels(values)])),
    "gradients of a root": _gradients_of(lambda norms: tf.sqrt(tf.add_n(norms))),
    "gradients of a mean": _gradients_of(lambda norms: tf.reduce_mean(tf.stack(norms))),
    "gradients of the greatest": _gradients_of(lambda norms: tf.reduce_max(tf.stack(norms))),
    "a product": lambda values: float(tf.reduce_prod(tf.stack([tf.norm(v) for v in values]))),
    "a difference": lambda values: values[0] * (tf.norm(values[0]) - tf.norm(values[1])),
    "the place": lambda values: int(tf.argmax(tf.stack([tf.norm(v) for v in values]))),
    "parts": lambda values: values[0] * tf.nn.softmax(tf.stack([tf.norm(v) for v in values]))[0],
    "numbers in each": lambda values: float(sum(tf.reduce_sum(v**2) + 0.1 for v in values)),
    "a metric": _metric,
    "a variable": _in_a_variable,
    "given to a function": lambda values: tf.function(tf.linalg.global_norm)(values) * values[0],
    "clipped in a function": lambda values: tf.function(
        lambda *given: tf.clip_by_global_norm(given, 0.1)[0]
    )(*values),
    "in a branch": lambda values: tf.cond(
        sum(tf.reduce_sum(v) for v in _kernels(values)) > 0.0,
        lambda: values[0] * 2.0,
        lambda: values[0],
    ),
    "for each": lambda values: [v / tf.linalg.global_norm(list(values)) for v in values],
}


#: Those that a graph has.
IN_BODIES = ("some", "a difference", "parts", "for each", "in a branch")


def of_some(side: Side, what: str, is_in_body: bool) -> Found:
    """Computes numbers of some variables or gradients, and tells Python numbers."""
    model, found = _model(side, "several"), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
        gradients = tape.gradient(loss, model.trainable_variables)
        if not is_in_body:
            return gradients, {}
        values = [tf.convert_to_tensor(v) for v in _values(what, gradients, _weights(model))]
        return gradients, {name: OF_SOME[name](values) for name in IN_BODIES}

    for number in range(2):
        gradients, numbers = compute(rows(number))
        found.append(tf.nest.map_structure(lambda each: each.reduce_mean(), numbers))
        values = _values(what, [each.accumulate() for each in gradients], _weights(model))
        if not is_in_body:
            values = [tf.convert_to_tensor(each) for each in values]
            found.append({name: way(values) for name, way in {**OF_SOME, **TOLD}.items()})
    return Found(tf.nest.map_structure(tf.convert_to_tensor, found), {})


def _weights(model: Any) -> Values:
    return [tf.convert_to_tensor(each) for each in model.trainable_variables]


#: Each takes values, and tells Python numbers of them, one after the other.
TOLD: dict[str, Callable[[Values], Any]] = {
    "numbers": lambda values: sum(float(tf.norm(each)) ** 2 for each in values),
    "in a loop": lambda values: [tf.norm(each).numpy() for each in values],
    "items": lambda values: max(tf.reduce_max(each).numpy().item() for each in values),
    "by their dimensions": lambda values: sum(int(tf.cast(tf.norm(v), tf.int32)) for v in values),
    "arrays": lambda values: sum(np.linalg.norm(each.numpy()) for each in values),
    "decisions": lambda values: any(bool(tf.reduce_any(v != v)) for v in values),
    "in a row": lambda values: np.sum(tf.stack([tf.norm(each) for each in values]).numpy()),
    "texts": lambda values: [float(f"{tf.norm(each):.3f}") for each in values],
}
