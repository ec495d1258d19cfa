"""Loops of training, as users write them, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import IS_KERAS_3, dense, model_of, train


def _two(side: Side) -> Any:
    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    return model_of(side, call, first=dense("first"), second=dense("second"))


def schedules(side: Side) -> Found:
    """A schedule of rates, decay of weights and their moving average."""
    rate = tf.keras.optimizers.schedules.CosineDecay(0.1, 10)
    kinds = tf.keras.optimizers
    optimizer = kinds.AdamW(rate, weight_decay=0.01, use_ema=True, ema_momentum=0.5)
    model = _two(side)
    if side.base is tf.keras.Model:
        model(rows())
    else:
        side.step(lambda x: model(x))(rows())
    optimizer.build(model.trainable_variables)
    found = train(side, model, rows(), optimizer)
    optimizer.finalize_variable_values(model.trainable_variables)
    return Found(found.same, by_name(model.trainable_variables, model.trainable_variables))


def accumulating_optimizer(side: Side) -> Found:
    """An optimizer that updates at every second call (Keras 3)."""
    options = {"gradient_accumulation_steps": 2} if IS_KERAS_3 else {}
    return train(side, _two(side), rows(), tf.keras.optimizers.Adam(0.1, **options), steps=4)


def clipped(side: Side) -> Found:
    """Gradients clipped by value, and by the norm of each."""
    found = train(side, _two(side), rows(), tf.keras.optimizers.SGD(1.0, clipvalue=0.01))
    tf.keras.backend.clear_session()
    other = train(side, _two(side), rows(), tf.keras.optimizers.SGD(1.0, clipnorm=0.01))
    return Found([*found.same, *other.same], other.own)


def rate_by_hand(side: Side) -> Found:
    """A rate that the loop changes."""
    optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True)

    def slower() -> None:
        optimizer.learning_rate.assign(optimizer.learning_rate * 0.5)

    return train(side, _two(side), rows(), optimizer, after=slower)


def adversaries(side: Side) -> Found:
    """Two models with an optimizer each, trained in turn on what the other gives."""
    maker = _two(side)

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.hidden(x)
        with side.part(1):
            return model.verdict(x)

    judge = model_of(side, call, hidden=dense("hidden"), verdict=dense("verdict", 1, None))
    one, other = tf.keras.optimizers.Adam(0.05), tf.keras.optimizers.Adam(0.05)
    loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @side.step
    def judging(noise: Any, real: Any) -> Any:
        fake = maker(noise)
        with tf.GradientTape() as tape:
            said = judge(fake), judge(real)
            loss = loss_of(tf.zeros_like(said[0]), said[0]) + loss_of(
                tf.ones_like(said[1]), said[1]
            )
        return tape.gradient(loss, judge.trainable_variables), loss

    @side.step
    def making(noise: Any) -> Any:
        with tf.GradientTape() as tape:
            said = judge(maker(noise))
            loss = loss_of(tf.ones_like(said), said)
        return tape.gradient(loss, maker.trainable_variables), loss

    losses = []
    for number in range(3):
        gradients, loss = judging(rows(number), rows(10 + number))
        other.apply_gradients(
            zip([g.accumulate() for g in gradients], judge.trainable_variables, strict=True)
        )
        losses.append(loss.reduce_mean())
        gradients, loss = making(rows(number))
        one.apply_gradients(
            zip([g.accumulate() for g in gradients], maker.trainable_variables, strict=True)
        )
        losses.append(loss.reduce_mean())
    return Found(losses, {})


def target_network(side: Side) -> Found:
    """A second model follows the first by hand, as in reinforcement learning."""
    model, target = _two(side), _two(side)

    @side.step
    def compute(x: Any) -> Any:
        wanted = target(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - tf.stop_gradient(wanted) - 0.1))
        return tape.gradient(loss, model.trainable_variables), loss

    optimizer, losses = tf.keras.optimizers.SGD(0.1), []
    for _ in range(3):
        gradients, loss = compute(rows())
        optimizer.apply_gradients(
            zip([g.accumulate() for g in gradients], model.trainable_variables, strict=True)
        )
        for one, other in zip(target.variables, model.variables, strict=True):
            one.assign(0.5 * one + 0.5 * other)
        losses.append(loss.reduce_mean())
    return Found(losses, {})


def whole_loop_in_a_function(side: Side) -> Found:
    """Step, update and metric in one ``tf.function``, called with a new batch each time."""
    model, optimizer = _two(side), tf.keras.optimizers.Adam(0.1)
    metric = tf.keras.metrics.Mean()
    plain = side.base is tf.keras.Model

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 0.3))
        return tape.gradient(loss, model.trainable_variables), loss

    def update(x: Any) -> Any:
        gradients, loss = compute(x)
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        metric.update_state(loss.reduce_mean())
        return loss.reduce_mean()

    if not plain:
        update = tf.function(update)
    losses = [update(rows(number)) for number in range(3)]
    return Found(
        [*losses, metric.result()], by_name(model.trainable_variables, model.trainable_variables)
    )


def data_pipeline(side: Side) -> Found:
    """A ``tf.data`` loop over batches of which the last is smaller."""
    model, optimizer = _two(side), tf.keras.optimizers.SGD(0.1)
    features = np.random.RandomState(0).standard_normal((20, WIDTH)).astype("float32")

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 0.3))
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for x in tf.data.Dataset.from_tensor_slices(features).batch(8):
        gradients, loss = compute(x)
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def several_losses(side: Side) -> Found:
    """Heads with losses of their own, summed; metrics beside them; sample weights."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.body(x)
        with side.part(1):
            return model.one(x), model.other(x)

    model = model_of(
        side, call, body=dense("body"), one=dense("one", 3, None), other=dense("other", 1, None)
    )
    weights = tf.constant(np.linspace(0.1, 2.0, 8), tf.float32)
    labels = tf.constant(np.arange(8) % 3)
    optimizer, losses = tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any, y: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            one, other = model(x, training=True)
            of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            huber = tf.keras.losses.Huber()
            loss = of(y, one, sample_weight=w) + 0.3 * huber(x[:, :1], other)
        right = tf.cast(tf.argmax(one, -1) == tf.cast(y, tf.int64), tf.float32)
        return tape.gradient(loss, model.trainable_variables), loss, tf.reduce_mean(right)

    for _ in range(3):
        gradients, loss, right = compute(rows(), labels, weights)
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        losses += [loss.reduce_mean(), right.reduce_mean()]
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def frozen_in_the_middle(side: Side) -> Found:
    """A layer frozen between steps, then free again."""
    model = _two(side)
    train(side, model, rows(), steps=1)
    model.first.trainable = False
    found = train(side, model, rows(), steps=2)
    model.first.trainable = True
    last = train(side, model, rows(), steps=1)
    return Found([*found.same, *last.same], last.own)


def gradients_of_features(side: Side) -> Found:
    """What an output depends on another one by, as maps of activations do it."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return x, model.second(x)

    model = model_of(side, call, first=dense("first"), second=dense("second"))

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            features, result = model(x)
            tape.watch(features)
            loss = tf.reduce_sum(result)
        gradient = tape.gradient(loss, features)
        return tf.zeros_like(features) if gradient is None else gradient

    return Found([compute(rows()).merge()], {})


def weights_by_hand(side: Side) -> Found:
    """``get_weights`` and ``set_weights`` of a layer, between steps."""
    model = _two(side)
    first = train(side, model, rows(), steps=1)
    model.first.set_weights([each * 0.5 for each in model.first.get_weights()])
    second = train(side, model, rows(), steps=1)
    return Found([*first.same, *second.same], second.own)


def _penalized(side: Side, is_told: bool) -> Found:
    """Decay of weights in the loss, also of a number; the loss that is told may be without it."""

    class Scaled(tf.keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
            self.built = True

        def call(self, x: Any) -> Any:
            return x * self.scale

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.scaled(model.first(x))
        with side.part(1):
            return model.second(x)

    model = model_of(
        side,
        call,
        first=dense("first"),
        second=dense("second"),
        scaled=lambda: Scaled(name="scaled"),
    )

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
            squares = [tf.reduce_sum(tf.square(each)) for each in model.trainable_variables]
            whole = loss + 0.1 * tf.add_n(squares)
        return tape.gradient(whole, model.trainable_variables), whole if is_told else loss

    losses = []
    for _ in range(2):
        gradients, loss = compute(rows())
        for each, variable in zip(gradients, model.trainable_variables, strict=True):
            variable.assign_sub(0.1 * each.accumulate())
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def penalty_in_gradients(side: Side) -> Found:
    """Each process decays its own weights, and all tell the loss of the model."""
    return _penalized(side, is_told=False)


def penalty_in_the_loss(side: Side) -> Found:
    """A loss with a penalty on all weights, which is the same on all processes."""
    return _penalized(side, is_told=True)


def kept_by_the_call(side: Side) -> Found:
    """A penalty on what the call left in an attribute."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
            object.__setattr__(model, "kept", x)
        with side.part(1):
            return model.second(x)

    model = model_of(side, call, first=dense("first"), second=dense("second"))
    return train(
        side,
        model,
        rows(),
        loss_of=lambda y: tf.reduce_mean(tf.square(y)) + tf.reduce_mean(tf.abs(model.kept)),
    )


#: What gives the numbers of TensorFlow.
NAMES = (
    "schedules",
    "accumulating_optimizer",
    "clipped",
    "rate_by_hand",
    "adversaries",
    "target_network",
    "whole_loop_in_a_function",
    "data_pipeline",
    "several_losses",
    "frozen_in_the_middle",
    "weights_by_hand",
    "penalty_in_gradients",
    "penalty_in_the_loss",
)
