"""Habits of scripts with gradients, norms, averages and optimizers, see ``tf_habits``."""

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
    labels,
    loop,
    means,
    names_of,
    square,
    update,
)
from tf_users import IS_KERAS_3, dense, model_of, two_halves

L = tf.keras.layers


def clip_in_the_body(side: Side) -> Found:
    """``clip_by_global_norm`` in the step, the norm logged outside."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.Adam(0.01), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = 20.0 * square(model, x)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        return gradients, loss, norm

    for number in range(3):
        gradients, loss, norm = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        same += [loss.reduce_mean(), norm.reduce_mean()]
    return ended(same, model)


def clip_twice(side: Side) -> Found:
    """By value, then by each norm, then by the norm of all with a given norm."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.5), []
    compute = computing(side, model)
    for number in range(3):
        gradients, loss = compute(rows(number))
        found = [tf.clip_by_value(each, -0.05, 0.05) for each in means(gradients)]
        found = [tf.clip_by_norm(each, 0.08) for each in found]
        norm = tf.linalg.global_norm(found)
        found, _ = tf.clip_by_global_norm(found, 0.1, use_norm=norm)
        update(optimizer, found, model.trainable_variables)
        same += [loss.reduce_mean(), norm, float(norm) > 0.1]
    return ended(same, model)


def clip_adaptively(side: Side) -> Found:
    """AGC: each unit of a gradient by the norm of its unit of the weight."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.5), []
    compute = computing(side, model, lambda model, x: 9.0 * square(model, x))

    def unit(value: Any) -> Any:
        axis = 0 if len(value.shape) > 1 else None
        return tf.sqrt(tf.reduce_sum(tf.square(value), axis, keepdims=True))

    for number in range(3):
        gradients, loss = compute(rows(number))
        found = []
        for gradient, variable in zip(means(gradients), model.trainable_variables, strict=True):
            most = tf.maximum(unit(variable), 1e-3) * 0.05
            norm = unit(gradient)
            clipped = gradient * (most / tf.maximum(norm, 1e-6))
            found.append(tf.where(norm < most, gradient, clipped))
        update(optimizer, found, model.trainable_variables)
        same.append(loss.reduce_mean())
    return ended(same, model)


def clip_in_a_train_function(side: Side) -> Found:
    """The norm of all in a ``tf.function`` around the step, a branch where it is not finite."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.1, momentum=0.9)
    compute = computing(side, model)

    def train(x: Any) -> Any:
        gradients, loss = compute(x)
        found = means(gradients)
        norm = tf.linalg.global_norm(found)
        scale = tf.where(tf.math.is_finite(norm), tf.minimum(1.0, 0.1 / norm), 0.0)
        update(optimizer, [each * scale for each in found], model.trainable_variables)
        return loss.reduce_mean(), norm, scale

    if side.base is not tf.keras.Model:
        train = tf.function(train)
    same = [train(rows(number)) for number in range(3)]
    return ended(same, model)


def penalty_on_weights(side: Side) -> Found:
    """Elastic net over kernels alone, by ``add_n`` in the loss."""
    model = two_halves(side)

    def loss_of(model: Any, x: Any) -> Any:
        loss = square(model, x)
        kernels = [each for each in model.trainable_variables if "kernel" in each.name]
        loss += 0.05 * tf.add_n([tf.nn.l2_loss(each) for each in kernels])
        return loss + 0.01 * sum(tf.reduce_sum(tf.abs(each)) for each in kernels)

    return loop(side, model, loss_of, [(rows(number),) for number in range(3)])


def penalty_on_orthogonality(side: Side) -> Found:
    """The Gram matrix of each kernel, and of the product of two, near the identity."""
    model = two_halves(side)

    def loss_of(model: Any, x: Any) -> Any:
        loss = square(model, x)
        one, other = (layer.kernel for layer in (model.first, model.second))
        for each in (one, other, tf.matmul(one, other)):
            gram = tf.matmul(each, each, transpose_a=True)
            loss += 0.1 * tf.reduce_sum(tf.square(gram - tf.eye(WIDTH)))
        return loss

    return loop(side, model, loss_of, [(rows(number),) for number in range(3)])


def elastic_weights(side: Side) -> Found:
    """EWC: a Fisher of squared gradients, weights of the first task held by it."""
    model, optimizer, same = two_halves(side, 3, None), tf.keras.optimizers.SGD(0.1), []
    compute, fisher = computing(side, model, classify), []
    for number in range(2):
        gradients, _ = compute(rows(number), labels(number))
        squares = [tf.square(each) for each in means(gradients)]
        fisher = [a + b for a, b in zip(fisher, squares, strict=True)] if fisher else squares
    anchors = [tf.identity(each) for each in model.trainable_variables]

    for number in range(3):
        gradients, loss = compute(rows(number + 5), labels(number + 5))
        with tf.GradientTape() as tape:
            groups = zip(fisher, model.trainable_variables, anchors, strict=True)
            held = tf.add_n([tf.reduce_sum(f * tf.square(v - a)) for f, v, a in groups])
        more = tape.gradient(held, model.trainable_variables)
        found = [a + 5.0 * b for a, b in zip(means(gradients), more, strict=True)]
        update(optimizer, found, model.trainable_variables)
        same += [loss.reduce_mean(), held]
    return ended(same, model)


def conflicting_tasks(side: Side) -> Found:
    """PCGrad: two losses' flat gradients, each without its part against the other."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = model(x, training=True)
            one, other = tf.reduce_mean(tf.square(y - 0.3)), tf.reduce_mean(tf.abs(y + 0.5))
        variables = model.trainable_variables
        return tape.gradient(one, variables), tape.gradient(other, variables), one, other

    def flat(values: Any) -> Any:
        return tf.concat([tf.reshape(each, [-1]) for each in values], 0)

    for number in range(3):
        first, second, one, other = compute(rows(number))
        a, b = flat(means(first)), flat(means(second))
        dot = tf.reduce_sum(a * b)
        if dot < 0:
            a, b = a - dot / tf.reduce_sum(b * b) * b, b - dot / tf.reduce_sum(a * a) * a
        variables = model.trainable_variables
        parts = tf.split(a + b, [int(np.prod(each.shape)) for each in variables])
        found = [tf.reshape(g, v.shape) for g, v in zip(parts, variables, strict=True)]
        update(optimizer, found, variables)
        same += [one.reduce_mean(), other.reduce_mean(), dot]
    return ended(same, model)


def balanced_tasks(side: Side) -> Found:
    """GradNorm: weights of losses from the norms of gradients of the shared layer."""
    model, weights = two_halves(side), tf.Variable([1.0, 1.0], name="task_weights")
    optimizer, same = tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = model(x, training=True)
            parts = [tf.reduce_mean(tf.square(y - 0.3)), tf.reduce_mean(tf.abs(y + 0.5))]
            loss = tf.reduce_sum(weights * tf.stack(parts))
        shared = [tape.gradient(each, model.first.kernel) for each in parts]
        return tape.gradient(loss, model.trainable_variables), shared, loss

    for number in range(3):
        gradients, shared, loss = compute(rows(number))
        norms = tf.stack([tf.norm(each) for each in means(shared)])
        update(optimizer, means(gradients), model.trainable_variables)
        weights.assign(weights * tf.reduce_mean(norms) / (norms + 1e-6))
        weights.assign(2.0 * weights / tf.reduce_sum(weights))
        same += [loss.reduce_mean(), norms, weights + 0.0]
    return ended(same, model)


def noise_on_gradients(side: Side) -> Found:
    """Clipped gradients with seeded noise, as for private training."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []
    compute, generator = computing(side, model), tf.random.Generator.from_seed(3)
    for number in range(3):
        gradients, loss = compute(rows(number))
        found, norm = tf.clip_by_global_norm(means(gradients), 0.1)
        found = [each + 0.01 * generator.normal(each.shape) for each in found]
        update(optimizer, found, model.trainable_variables)
        same += [loss.reduce_mean(), norm]
    return ended(same, model)


def watched_weights(side: Side) -> Found:
    """A tape that watches nothing by itself, two layers given to it."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []
    side.step(lambda x: model(x))(rows())

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for each in model.second.trainable_variables:
                tape.watch(each.value if IS_KERAS_3 else each)
            loss = square(model, x)
        return tape.gradient(loss, model.second.trainable_variables), loss

    for number in range(3):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.second.trainable_variables)
        same.append(loss.reduce_mean())
    return ended(same, model)


def stopped_recording(side: Side) -> Found:
    """``tape.stop_recording`` around a second call, ``tape.reset`` after a first one."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            model(2.0 * x, training=True)
            tape.reset()
            y = model(x, training=True)
            with tape.stop_recording():
                aim = model(-x, training=False)
            loss = tf.reduce_mean(tf.square(y - aim - 0.2))
        return tape.gradient(loss, model.trainable_variables), loss

    for number in range(3):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        same.append(loss.reduce_mean())
    return ended(same, model)


def unconnected(side: Side) -> Found:
    """A list of lists of sources, zeros for gradients of a head that the loss leaves out."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.left(x), model.right(x)

    model = model_of(
        side, call, first=dense("first"), left=dense("left", 3, None), right=dense("right", 1)
    )
    optimizer, same = tf.keras.optimizers.SGD(0.1, momentum=0.5), []
    side.step(lambda x: model(x))(rows())

    @side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = entropy(y, model(x, training=True)[0])
        sources = [layer.trainable_variables for layer in (model.right, model.left)]
        return tape.gradient(loss, sources), loss

    for number in range(3):
        gradients, loss = compute(rows(number), labels(number))
        variables = [*model.right.trainable_variables, *model.left.trainable_variables]
        found = means([each for some in gradients for each in some])
        pairs = zip(found, variables, strict=True)
        found = [tf.zeros_like(v) if each is None else each for each, v in pairs]
        optimizer.apply_gradients(zip(found, variables, strict=True))
        same.append(loss.reduce_mean())
    return ended(same, model)


def output_gradients(side: Side) -> Found:
    """Gradients of results with weights of one's own (``output_gradients``), and of sums."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []

    @side.step
    def compute(x: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x, training=True)
        return tape.gradient(y, model.trainable_variables, output_gradients=weights), y

    for number in range(3):
        gradients, y = compute(rows(number), 0.1 * rows(number + 4))
        update(optimizer, means(gradients), model.trainable_variables)
        same.append(y.merge())
    return ended(same, model)


NAMES = names_of(globals())
