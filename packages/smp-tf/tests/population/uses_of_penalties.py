"""Penalties by hand on some of the weights, and numbers of them, see ``tf_beside``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from making import square
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import apply, dense, model_of, two_halves

L = tf.keras.layers


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def _kernels(model: Any) -> list[Any]:
    return [each for each in model.trainable_weights if "kernel" in _name(each)]


def _norms(variables: Any) -> list[Any]:
    return [tf.nn.l2_loss(tf.convert_to_tensor(each)) for each in variables]


def _deep(side: Side) -> Any:
    """Returns a model with two layers on each half."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.second(model.first(x))
        with side.part(1):
            return model.fourth(model.third(x))

    names = ("first", "second", "third", "fourth")
    return model_of(side, call, **{name: dense(name) for name in names})


def _lopsided(side: Side) -> Any:
    """Returns a model of which one half alone has a kernel."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.norm(tf.tanh(x) * 2.0)

    return model_of(
        side, call, first=dense("first"), norm=lambda: L.LayerNormalization(name="norm")
    )


def _trained(
    side: Side,
    model: Any,
    penalty: Callable[[Any, Any], Any],
    second: Callable[[Any], Any] | None = None,
    steps: int = 2,
) -> Found:
    """Trains by a loss and a penalty; returns losses and weights.

    Args:
        side: where.
        model: is trained.
        penalty: takes the model and the loss, returns the loss with more in it.
        second: takes the model; of which a tape of its own, outside, has the gradients.
        steps: how many.
    """
    optimizer, losses = tf.keras.optimizers.SGD(0.3), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = penalty(model, square(model, x))
        return tape.gradient(loss, model.trainable_variables), loss

    for number in range(steps):
        gradients, loss = compute(rows(number))
        means = [each.accumulate() for each in gradients]
        if second is not None:
            with tf.GradientTape() as tape:
                more = second(model)
            others = tape.gradient(more, model.trainable_variables)
            means = [a if b is None else a + b for a, b in zip(means, others, strict=True)]
        apply(optimizer, model, means)
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def penalty_on_kernels(side: Side) -> Found:
    return _trained(
        side, two_halves(side), lambda model, loss: loss + 0.1 * tf.add_n(_norms(_kernels(model)))
    )


def penalty_on_many_kernels(side: Side) -> Found:
    return _trained(
        side, _deep(side), lambda model, loss: loss + 0.1 * tf.add_n(_norms(_kernels(model)))
    )


def penalty_summed_by_sum(side: Side) -> Found:
    return _trained(side, _deep(side), lambda model, loss: loss + sum(_norms(_kernels(model))) / 9)


def penalty_in_a_loop(side: Side) -> Found:
    def penalized(model: Any, loss: Any) -> Any:
        for each in model.trainable_variables:
            if "bias" not in _name(each):
                loss += 0.05 * tf.reduce_sum(tf.square(each))
        return loss

    return _trained(side, _deep(side), penalized)


def penalty_in_a_loop_of_one(side: Side) -> Found:
    def penalized(model: Any, loss: Any) -> Any:
        for each in _kernels(model):
            loss = loss + 0.05 * tf.reduce_sum(tf.abs(each))
        return loss

    return _trained(side, two_halves(side), penalized)


def penalty_from_zero(side: Side) -> Found:
    def penalized(model: Any, loss: Any) -> Any:
        total = tf.constant(0.0)
        for each in _kernels(model):
            total += tf.nn.l2_loss(tf.convert_to_tensor(each))
        return loss + 0.1 * total

    return _trained(side, _deep(side), penalized)


def penalty_on_biases_too(side: Side) -> Found:
    def penalized(model: Any, loss: Any) -> Any:
        kernels = tf.add_n(_norms(_kernels(model)))
        biases = [each for each in model.trainable_variables if "bias" in _name(each)]
        return loss + 0.1 * kernels + 0.01 * tf.add_n(_norms(biases))

    return _trained(side, _deep(side), penalized)


def penalty_on_one_half(side: Side) -> Found:
    return _trained(
        side, _lopsided(side), lambda model, loss: loss + 0.1 * sum(_norms(_kernels(model)))
    )


def penalty_added_up_on_one_half(side: Side) -> Found:
    return _trained(
        side,
        _lopsided(side),
        lambda model, loss: loss + 0.1 * tf.add_n(_norms(_kernels(model))),
    )


def penalty_on_a_layer(side: Side) -> Found:
    return _trained(
        side,
        two_halves(side),
        lambda model, loss: loss + 0.1 * tf.nn.l2_loss(tf.convert_to_tensor(model.second.kernel)),
    )


def penalty_by_a_regularizer(side: Side) -> Found:
    regularizer = tf.keras.regularizers.L2(0.05)
    return _trained(
        side,
        _deep(side),
        lambda model, loss: loss + sum(regularizer(each) for each in _kernels(model)),
    )


def penalty_of_layers_by_hand(side: Side) -> Found:
    regularizer = tf.keras.regularizers.L1(0.05)

    def penalized(model: Any, loss: Any) -> Any:
        layers = (model.first, model.second)
        return loss + tf.add_n([regularizer(each.kernel) for each in layers])

    return _trained(side, two_halves(side), penalized)


def penalty_outside(side: Side) -> Found:
    return _trained(
        side,
        _deep(side),
        lambda model, loss: loss,
        lambda model: 0.1 * tf.add_n(_norms(_kernels(model))),
    )


def penalty_outside_of_one(side: Side) -> Found:
    return _trained(
        side,
        two_halves(side),
        lambda model, loss: loss,
        lambda model: 0.1 * sum(_norms(_kernels(model))),
    )


def penalty_outside_in_a_root(side: Side) -> Found:
    return _trained(
        side,
        two_halves(side),
        lambda model, loss: loss,
        lambda model: tf.sqrt(1.0 + tf.add_n(_norms(_kernels(model)))),
    )


def penalty_in_a_root(side: Side) -> Found:
    return _trained(
        side,
        two_halves(side),
        lambda model, loss: loss + tf.sqrt(1.0 + tf.add_n(_norms(_kernels(model)))),
    )


def penalty_outside_in_a_mean(side: Side) -> Found:
    return _trained(
        side,
        _deep(side),
        lambda model, loss: loss,
        lambda model: 0.1 * tf.reduce_mean(tf.stack(_norms(_kernels(model)))),
    )


def penalty_outside_of_a_list(side: Side) -> Found:
    return _trained(
        side,
        two_halves(side),
        lambda model, loss: loss,
        lambda model: 0.1 * tf.reduce_sum(_norms(_kernels(model))),
    )


def _untold(side: Side, total_of: Callable[[Any, Any], Any]) -> Found:
    """Trains by a loss that is not returned."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.3)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = square(model, x)
            total = total_of(loss, _norms(_kernels(model)))
        return tape.gradient(total, model.trainable_variables), loss

    losses = []
    for number in range(2):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def penalty_untold(side: Side) -> Found:
    return _untold(side, lambda loss, norms: loss + 0.1 * tf.add_n(norms))


def penalty_of_each_example_untold(side: Side) -> Found:
    return _untold(
        side, lambda loss, norms: tf.reduce_mean(tf.fill([3], loss) + 0.1 * tf.add_n(norms))
    )


def penalty_in_a_root_untold(side: Side) -> Found:
    return _untold(side, lambda loss, norms: loss + tf.sqrt(0.1 + tf.add_n(norms)))


def penalty_times_the_loss_untold(side: Side) -> Found:
    return _untold(side, lambda loss, norms: loss * (1.0 + tf.add_n(norms)))


def penalty_in_a_mean_untold(side: Side) -> Found:
    return _untold(side, lambda loss, norms: loss + tf.reduce_mean(tf.stack(norms)))


def penalty_of_the_greatest_untold(side: Side) -> Found:
    return _untold(side, lambda loss, norms: loss + tf.reduce_max(norms))


def penalty_in_a_function_untold(side: Side) -> Found:
    penalty = tf.function(lambda *norms: 0.1 * tf.add_n(norms))
    return _untold(side, lambda loss, norms: loss + penalty(*norms))


def penalty_on_the_first(side: Side) -> Found:
    return _trained(
        side,
        two_halves(side),
        lambda model, loss: loss + 0.1 * tf.nn.l2_loss(model.trainable_variables[0] + 0.0),
    )


def penalty_returned_alone(side: Side) -> Found:
    model = two_halves(side)
    optimizer, same = tf.keras.optimizers.SGD(0.3), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = square(model, x)
            penalty = 0.1 * tf.add_n(_norms(_kernels(model)))
            total = loss + penalty
        return tape.gradient(total, model.trainable_variables), loss, penalty

    for number in range(2):
        gradients, *others = compute(rows(number))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        same += [each.reduce_mean() for each in others]
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def penalty_told_alone(side: Side) -> Found:
    """The loss is returned without the penalty, whose sum is told outside."""
    model = two_halves(side)
    optimizer, same = tf.keras.optimizers.SGD(0.3), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = square(model, x)
            total = loss + 0.1 * tf.add_n(_norms(_kernels(model)))
        return tape.gradient(total, model.trainable_variables), loss

    for number in range(2):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        told = float(tf.add_n(_norms(_kernels(model))))
        same += [loss.reduce_mean(), np.float32(told)]
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def _after(side: Side, told: Callable[[Any], Any], model: Any = None) -> Found:
    model = model or two_halves(side)
    found = _trained(side, model, lambda model, loss: loss)
    return found._replace(same=[*found.same, np.float32(told(model))])


def told_norm_of_kernels(side: Side) -> Found:
    return _after(side, lambda model: tf.linalg.global_norm(_kernels(model)).numpy())


def told_sum_of_kernels(side: Side) -> Found:
    return _after(side, lambda model: float(sum(_norms(_kernels(model)))))


def told_of_one_layer(side: Side) -> Found:
    return _after(side, lambda model: float(tf.norm(model.first.kernel)))


def told_of_whole_weights(side: Side) -> Found:
    return _after(side, lambda model: sum(np.linalg.norm(each) for each in model.get_weights()))


def counted_parameters(side: Side) -> Found:
    return _after(side, lambda model: model.count_params())


def list_from_before(side: Side) -> Found:
    """A list of the variables of a model that was built, from before the first step."""
    model = tf.keras.Sequential(
        [tf.keras.Input((WIDTH,)), *(dense(name)() for name in ("first", "second"))]
    )
    model = model if side.base is tf.keras.Model else side.base(model)
    variables = list(model.trainable_variables)
    optimizer, losses = tf.keras.optimizers.SGD(0.3), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = square(model, x)
        return tape.gradient(loss, variables), loss

    for number in range(2):
        gradients, loss = compute(rows(number))
        pairs = [
            (each.accumulate(), variable)
            for each, variable in zip(gradients, variables, strict=True)
            if each is not None
        ]
        optimizer.apply_gradients(pairs)
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


#: What gives the numbers of TensorFlow.
NAMES = tuple(
    name
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("_")
)
