"""Habits of scripts with losses of several calls, models and tapes, see ``tf_habits``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side
from tf_calls import WIDTH, rows
from tf_habits import (
    classify,
    computing,
    ended,
    entropy,
    halves,
    labels,
    loop,
    means,
    names_of,
    update,
)
from tf_users import dense, model_of, two_halves

L = tf.keras.layers


def gan_of_two_tapes(side: Side) -> Found:
    """DCGAN as on TensorFlow's pages: both models, both tapes, one pass."""
    generator, critic = halves(side, "make"), halves(side, "judge", 1)
    of_made, of_judged = tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.Adam(0.01)
    cross = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    same = []

    @side.step
    def compute(noise: Any, real: Any) -> Any:
        with tf.GradientTape() as one, tf.GradientTape() as other:
            made = generator(noise, training=True)
            good, bad = critic(real, training=True), critic(made, training=True)
            of_maker = cross(tf.ones_like(bad), bad)
            of_judge = cross(tf.ones_like(good), good) + cross(tf.zeros_like(bad), bad)
        return (
            one.gradient(of_maker, generator.trainable_variables),
            other.gradient(of_judge, critic.trainable_variables),
            of_maker,
            of_judge,
        )

    for number in range(3):
        makes, judges, *losses = compute(rows(number), rows(number + 9))
        update(of_made, means(makes), generator.trainable_variables)
        update(of_judged, means(judges), critic.trainable_variables)
        same += means(losses)
    return ended(same, generator, critic)


def gan_with_penalty(side: Side) -> Found:
    """WGAN-GP: two turns of the critic, mixing by given numbers, then the generator."""
    generator, critic = halves(side, "make"), halves(side, "judge", 1)
    of_made, of_judged = tf.keras.optimizers.SGD(0.05), tf.keras.optimizers.SGD(0.05)
    same = []

    @side.step
    def judge(noise: Any, real: Any, mix: Any) -> Any:
        made = generator(noise, training=True)
        with tf.GradientTape() as tape:
            good, bad = critic(real, training=True), critic(made, training=True)
            between = real + mix * (made - real)
            with tf.GradientTape() as inner:
                inner.watch(between)
                score = critic(between, training=True)
            slope = inner.gradient(score, [between])[0]
            norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=[1]))
            loss = tf.reduce_mean(bad) - tf.reduce_mean(good)
            loss += 10.0 * tf.reduce_mean((norm - 1.0) ** 2)
        return tape.gradient(loss, critic.trainable_variables), loss

    @side.step
    def make(noise: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise, training=True), training=True))
        return tape.gradient(loss, generator.trainable_variables), loss

    for number in range(2):
        for turn in range(2):
            mix = tf.constant(np.random.RandomState(turn).rand(8, 1), tf.float32)
            gradients, loss = judge(rows(number), rows(number + 5 + turn), mix)
            update(of_judged, means(gradients), critic.trainable_variables)
            same.append(loss.reduce_mean())
        gradients, loss = make(rows(number))
        update(of_made, means(gradients), generator.trainable_variables)
        same.append(loss.reduce_mean())
    return ended(same, generator, critic)


def attacked_by_signs(side: Side) -> Found:
    """FGSM in the step, the clean and the moved batch in one loss."""
    model, optimizer, same = two_halves(side, 3, None), tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = entropy(y, model(x, training=False))
        moved = tf.clip_by_value(x + 0.1 * tf.sign(tape.gradient(loss, x)), -2.0, 2.0)
        with tf.GradientTape() as tape:
            both = tf.concat([x, tf.stop_gradient(moved)], 0)
            loss = entropy(tf.concat([y, y], 0), model(both, training=True))
        return tape.gradient(loss, model.trainable_variables), loss, moved

    for number in range(3):
        gradients, loss, moved = compute(rows(number), labels(number))
        update(optimizer, means(gradients), model.trainable_variables)
        same += [loss.reduce_mean(), moved.merge()]
    return ended(same, model)


def attacked_from_outside(side: Side) -> Found:
    """PGD: a step gives gradients of the batch, which is moved outside, three times."""
    model, optimizer, same = two_halves(side, 3, None), tf.keras.optimizers.SGD(0.1), []
    compute = computing(side, model, classify)

    @side.step
    def slope(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = entropy(y, model(x, training=False))
        return tape.gradient(loss, x)

    for number in range(2):
        x, y = rows(number), labels(number)
        moved = x
        for _ in range(3):
            moved = moved + 0.05 * tf.sign(slope(moved, y).merge())
            moved = tf.clip_by_value(moved, x - 0.1, x + 0.1)
        gradients, loss = compute(moved, y)
        update(optimizer, means(gradients), model.trainable_variables)
        same += [loss.reduce_mean(), moved]
    return ended(same, model)


def smoothed_locally(side: Side) -> Found:
    """VAT: the direction of greatest divergence by one power iteration, in the step."""
    model, optimizer, same = two_halves(side, 3, None), tf.keras.optimizers.SGD(0.1), []

    def divergence(p: Any, q: Any) -> Any:
        p, q = tf.nn.log_softmax(p), tf.nn.log_softmax(q)
        return tf.reduce_mean(tf.reduce_sum(tf.exp(p) * (p - q), -1))

    @side.step
    def compute(x: Any, y: Any, noise: Any) -> Any:
        clean = tf.stop_gradient(model(x, training=True))
        move = 1e-1 * tf.math.l2_normalize(noise, -1)
        with tf.GradientTape() as tape:
            tape.watch(move)
            distance = divergence(clean, model(x + move, training=True))
        move = tf.stop_gradient(tf.math.l2_normalize(tape.gradient(distance, move), -1))
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            far = divergence(tf.stop_gradient(logits), model(x + move, training=True))
            loss = entropy(y, logits) + far
        return tape.gradient(loss, model.trainable_variables), loss

    for number in range(3):
        gradients, loss = compute(rows(number), labels(number), rows(number + 4))
        update(optimizer, means(gradients), model.trainable_variables)
        same.append(loss.reduce_mean())
    return ended(same, model)


def teacher_in_the_step(side: Side) -> Found:
    """Distillation from a second distributed model, features and results."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            feature = model.first(x)
        with side.part(1):
            return feature, model.second(feature)

    def make(name: str) -> Any:
        layers = {"first": dense(f"{name}_a"), "second": dense(f"{name}_b", 3, None)}
        return model_of(side, call, **layers)

    teacher, student = make("teacher"), make("student")
    teacher.trainable = False

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        hints, wise = teacher(x, training=False)
        features, logits = model(x, training=True)
        wise = tf.nn.softmax(wise / 2.0)
        soft = tf.reduce_sum(wise * (tf.math.log(wise) - tf.nn.log_softmax(logits / 2.0)), -1)
        hint = tf.reduce_mean(tf.square(features - tf.stop_gradient(hints)))
        return entropy(y, logits) + 4.0 * tf.reduce_mean(soft) + 0.5 * hint

    found = loop(side, student, loss_of, [(rows(n), labels(n)) for n in range(3)])
    return ended([*found.same, len(teacher.trainable_variables)], teacher, student)


def contrasted_views(side: Side) -> Found:
    """SimCLR: two views, one pass, a softmax over similarities with the diagonal out."""
    model, heat = two_halves(side), tf.Variable(0.5, name="heat")
    optimizer, same = tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            z = tf.math.l2_normalize(model(tf.concat([x, y], 0), training=True), -1)
            count = tf.shape(x)[0]
            near = tf.matmul(z, z, transpose_b=True) / heat
            near = near - 1e9 * tf.eye(2 * count)
            other = tf.concat([tf.range(count) + count, tf.range(count)], 0)
            loss = entropy(other, near)
        return tape.gradient(loss, [*model.trainable_variables, heat]), loss

    for number in range(3):
        gradients, loss = compute(rows(number), rows(number) + 0.1 * rows(number + 5))
        update(optimizer, means(gradients), [*model.trainable_variables, heat])
        same += [loss.reduce_mean(), heat + 0.0]
    return ended(same, model)


def bootstrapped_views(side: Side) -> Found:
    """BYOL: an online and a slow encoder, a predictor outside of both."""
    online, slow = halves(side, "online"), halves(side, "slow")
    predictor = L.Dense(WIDTH, name="predictor")
    predictor.build((None, WIDTH))
    optimizer, same = tf.keras.optimizers.SGD(0.1), []
    side.step(lambda x: (online(x), slow(x)))(rows())
    for one, other in zip(slow.weights, online.weights, strict=True):
        one.assign(other)

    @side.step
    def compute(x: Any, y: Any) -> Any:
        aim = tf.stop_gradient(tf.math.l2_normalize(slow(y, training=True), -1))
        with tf.GradientTape() as tape:
            found = tf.math.l2_normalize(predictor(online(x, training=True)), -1)
            loss = 2.0 - 2.0 * tf.reduce_mean(tf.reduce_sum(found * aim, -1))
        every = online.trainable_variables + predictor.trainable_variables
        return tape.gradient(loss, every), loss

    for number in range(3):
        gradients, loss = compute(rows(number), rows(number + 4))
        every = online.trainable_variables + predictor.trainable_variables
        update(optimizer, means(gradients), every)
        for one, other in zip(slow.weights, online.weights, strict=True):
            one.assign_add(0.1 * (other - one))
        same += [loss.reduce_mean(), tf.reduce_sum(predictor.kernel)]
    return ended(same, online, slow)


def triplets_of_the_hardest(side: Side) -> Found:
    """Batch-hard triplets by masks of labels, in the microbatch."""
    model = two_halves(side)

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        z = model(x, training=True)
        far = tf.reduce_sum(tf.square(z[:, None] - z[None]), -1)
        alike = tf.equal(y[:, None], y[None])
        most = tf.reduce_max(tf.where(alike, far, 0.0), 1)
        least = tf.reduce_min(tf.where(alike, 1e6, far), 1)
        return tf.reduce_mean(tf.nn.softplus(most - least))

    y = tf.constant([0, 0, 1, 1] * 2)
    return loop(side, model, loss_of, [(rows(n), y) for n in range(3)])


def uncertain_losses(side: Side) -> Found:
    """Log-variances of tasks that are weights of the model itself, read by the loss."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.body(x)
        with side.part(1):
            return model.left(x), model.right(x)

    class Logs(L.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="logs")
            self.logs = self.add_weight(name="logs", shape=(2,), initializer="zeros")

        def call(self, given: Any) -> Any:
            return given

    model = model_of(
        side,
        lambda model, x, training: model.logs(call(model, x, training)),
        body=dense("body"),
        left=dense("left"),
        right=dense("right"),
        logs=Logs,
    )

    def loss_of(model: Any, x: Any) -> Any:
        left, right = model(x, training=True)
        parts = tf.stack([tf.reduce_mean((left - 0.3) ** 2), tf.reduce_mean(tf.abs(right))])
        logs = tf.convert_to_tensor(model.logs.logs)
        return tf.reduce_sum(tf.exp(-logs) * parts + logs)

    return loop(side, model, loss_of, [(rows(n),) for n in range(3)])


def domains_confused(side: Side) -> Found:
    """DANN: a gradient is turned around by ``tf.custom_gradient``, two heads."""

    @tf.custom_gradient
    def turned(x: Any) -> Any:
        return tf.identity(x), lambda upstream: -0.5 * upstream

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.body(x)
            side_of = model.domain(turned(x))
        with side.part(1):
            return model.head(x), side_of

    model = model_of(
        side, call, body=dense("body"), head=dense("head", 3, None), domain=dense("of", 2, None)
    )

    def loss_of(model: Any, x: Any, y: Any, where: Any) -> Any:
        logits, side_of = model(x, training=True)
        return entropy(y, logits) + entropy(where, side_of)

    batches = [(rows(n), labels(n), labels(n + 1, 2)) for n in range(3)]
    return loop(side, model, loss_of, batches)


NAMES = names_of(globals())
