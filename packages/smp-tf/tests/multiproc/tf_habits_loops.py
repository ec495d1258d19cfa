"""Habits of loops of training that scripts write themselves, see ``tf_habits``."""

from __future__ import annotations

import tempfile
from pathlib import Path
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
    numbers,
    square,
    update,
)
from tf_users import dense, model_of, two_halves

L = tf.keras.layers


def deep_q(side: Side) -> Found:
    """DQN: a greedy policy by NumPy, a replay of arrays, a target that is copied."""
    model, target = halves(side, "q", 3), halves(side, "target", 3)
    optimizer, same = tf.keras.optimizers.Adam(0.01), []
    side.step(lambda x: (model(x), target(x)))(rows())
    target.set_weights(model.get_weights())
    values = side.step(lambda x: model(x, training=False))

    @side.step
    def compute(now: Any, action: Any, reward: Any, later: Any, done: Any) -> Any:
        best = tf.reduce_max(target(later, training=False), 1)
        aim = reward + 0.9 * best * (1.0 - done)
        with tf.GradientTape() as tape:
            q = tf.reduce_sum(model(now, training=True) * tf.one_hot(action, 3), 1)
            loss = tf.reduce_mean(tf.keras.losses.huber(aim[:, None], q[:, None]))
        return tape.gradient(loss, model.trainable_variables), loss, tf.abs(aim - q)

    for number in range(4):
        now = rows(number)
        action = np.argmax(values(now).merge().numpy(), -1)
        reward = tf.constant((action == 1).astype("float32"))
        done = tf.constant([0.0, 1.0] * 4)
        gradients, loss, error = compute(now, tf.constant(action), reward, rows(number + 7), done)
        update(optimizer, means(gradients), model.trainable_variables)
        if number % 2:
            target.set_weights(model.get_weights())
        same += [loss.reduce_mean(), error.merge()]
    return ended(same, model, target)


def deep_q_with_soft_target(side: Side) -> Found:
    """DDPG's update of targets: pairs of variables, in a ``tf.function``."""
    model, target = halves(side, "q", 3), halves(side, "target", 3)
    optimizer, same = tf.keras.optimizers.Adam(0.01), []
    side.step(lambda x: (model(x), target(x)))(rows())

    @tf.function
    def follow(tau: Any) -> None:
        for one, other in zip(target.variables, model.variables, strict=True):
            one.assign(other * tau + one * (1.0 - tau))

    @side.step
    def compute(x: Any) -> Any:
        aim = target(x, training=False)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - aim - 0.1))
        return tape.gradient(loss, model.trainable_variables), loss

    follow(tf.constant(1.0))
    for number in range(3):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        follow(tf.constant(0.1))
        same.append(loss.reduce_mean())
    return ended(same, model, target)


def actor_and_critic(side: Side) -> Found:
    """Policy and value of one model, advantages without gradient, an entropy bonus."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.body(x)
        with side.part(1):
            return model.policy(x), model.value(x)

    model = model_of(
        side, call, body=dense("body"), policy=dense("policy", 3, None), value=dense("value", 1)
    )

    def loss_of(model: Any, x: Any, action: Any, returns: Any) -> Any:
        logits, value = model(x, training=True)
        value = tf.squeeze(value, -1)
        logs = tf.nn.log_softmax(logits)
        chosen = tf.gather(logs, action, axis=1, batch_dims=1)
        advantage = tf.stop_gradient(returns - value)
        spread = -tf.reduce_sum(tf.exp(logs) * logs, -1)
        loss = -tf.reduce_mean(chosen * advantage) + 0.5 * tf.reduce_mean((returns - value) ** 2)
        return loss - 0.01 * tf.reduce_mean(spread)

    batches = [(rows(n), labels(n), numbers(n + 3)) for n in range(3)]
    return loop(side, model, loss_of, batches, tf.keras.optimizers.RMSprop(0.01))


def clipped_policy(side: Side) -> Found:
    """PPO: log-probabilities of the old policy from a step before, several epochs, KL stops."""
    model, optimizer, same = two_halves(side, 3, None), tf.keras.optimizers.Adam(0.05), []
    old = side.step(lambda x, a: tf.gather(tf.nn.log_softmax(model(x)), a, axis=1, batch_dims=1))

    @side.step
    def compute(x: Any, action: Any, before: Any, advantage: Any) -> Any:
        with tf.GradientTape() as tape:
            logs = tf.nn.log_softmax(model(x, training=True))
            chosen = tf.gather(logs, action, axis=1, batch_dims=1)
            ratio = tf.exp(chosen - before)
            most = tf.where(advantage > 0, 1.2 * advantage, 0.8 * advantage)
            loss = -tf.reduce_mean(tf.minimum(ratio * advantage, most))
        return tape.gradient(loss, model.trainable_variables), loss, before - chosen

    x, action, advantage = rows(), labels(), numbers(3)
    before = old(x, action).merge()
    for _ in range(6):
        gradients, loss, far = compute(x, action, before, advantage)
        same += [loss.reduce_mean(), tf.reduce_mean(far.merge())]
        if tf.reduce_mean(far.merge()) > 0.05:
            break
        update(optimizer, means(gradients), model.trainable_variables)
    return ended(same, model)


def rate_found(side: Side) -> Found:
    """A finder of rates: rates rise until the loss does, then weights and optimizer start anew."""
    model, same = two_halves(side), []
    optimizer = tf.keras.optimizers.SGD(1e-3, momentum=0.9)
    compute = computing(side, model)
    compute(rows())
    start, best = model.get_weights(), float("inf")
    for _ in range(12):
        gradients, loss = compute(rows())
        now = float(loss.reduce_mean())
        same.append(now)
        best = min(best, now)
        if now > 2.0 * best:
            break
        update(optimizer, means(gradients), model.trainable_variables)
        optimizer.learning_rate = float(optimizer.learning_rate) * 3.0
    model.set_weights(start)
    found = loop(side, model, square, [(rows(n),) for n in range(2)])
    return found._replace(same=[*same, *found.same])


def warm_restarts(side: Side) -> Found:
    """A schedule with restarts, whose rate is read, and an optimizer that is made anew."""
    model, same = two_halves(side), []
    compute = computing(side, model)
    for _ in range(2):
        rate = tf.keras.optimizers.schedules.CosineDecayRestarts(0.1, 2)
        optimizer = tf.keras.optimizers.SGD(rate, momentum=0.9)
        for number in range(3):
            gradients, loss = compute(rows(number))
            update(optimizer, means(gradients), model.trainable_variables)
            same += [loss.reduce_mean(), rate(optimizer.iterations), int(optimizer.iterations)]
    return ended(same, model)


def stopped_early(side: Side) -> Found:
    """Patience by hand: the best weights are kept in memory and put back."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(3.0), []
    compute, evaluate = computing(side, model), side.step(lambda x: square(model, x))
    best, kept, waited = np.inf, None, 0
    for number in range(6):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        now = evaluate(rows(9)).reduce_mean().numpy()
        same += [loss.reduce_mean(), now]
        if now < best:
            best, kept, waited = now, [v.numpy() for v in model.variables], 0
        else:
            waited += 1
        if waited == 2:
            break
    for each, value in zip(model.variables, kept, strict=True):
        each.assign(value)
    return ended([*same, evaluate(rows(9)).reduce_mean()], model)


def summaries(side: Side) -> Found:
    """``tf.summary`` of losses, norms and weights, each step."""
    model, optimizer, same = two_halves(side), tf.keras.optimizers.SGD(0.1), []
    compute = computing(side, model)
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)
        for number in range(2):
            gradients, loss = compute(rows(number))
            found = means(gradients)
            with writer.as_default(step=number):
                tf.summary.write("loss", loss.reduce_mean())
                tf.summary.write("norm", tf.linalg.global_norm(found))
                for each in model.trainable_variables:
                    tf.summary.write(each.name, tf.convert_to_tensor(each))
            update(optimizer, found, model.trainable_variables)
            same.append(loss.reduce_mean())
        writer.flush()
        same.append(np.float32(len(list(Path(folder).iterdir()))))
    return ended(same, model)


def dataset_in_a_function(side: Side) -> Found:
    """A ``tf.function`` loops over a dataset that is mapped, cached, repeated and prefetched."""
    model, optimizer = two_halves(side, 3, None), tf.keras.optimizers.Adam(0.05)
    compute, mean = computing(side, model, classify), tf.keras.metrics.Mean()
    x = np.random.RandomState(0).standard_normal((16, WIDTH)).astype("float32")
    sets = tf.data.Dataset.from_tensor_slices((x, np.arange(16) % 3))
    sets = sets.map(lambda x, y: (2.0 * x, y)).cache().batch(8, drop_remainder=True)
    compute(rows(), labels())

    def epoch(sets: Any) -> Any:
        for x, y in sets:
            gradients, loss = compute(x, y)
            update(optimizer, means(gradients), model.trainable_variables)
            mean.update_state(loss.reduce_mean())

    same = []
    for _ in range(2):
        epoch(sets.prefetch(2))
        same.append(mean.result())
        mean.reset_state()
    return ended(same, model)


def validated_between(side: Side) -> Found:
    """Training and validation in turns, with metrics, dropout and batch normalisation."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.norm(model.first(x), training=training)
        with side.part(1):
            return model.head(model.drop(x, training=training))

    model = model_of(
        side,
        call,
        first=dense("first"),
        norm=lambda: L.BatchNormalization(name="norm", momentum=0.5),
        drop=lambda: L.Dropout(0.5, seed=3, name="drop"),
        head=dense("head", 3, None),
    )
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    validate = side.step(lambda x, y: (entropy(y, model(x, training=False)), model(x)))
    compute, optimizer, same = computing(side, model, classify), tf.keras.optimizers.SGD(0.1), []
    for number in range(3):
        gradients, loss = compute(rows(number), labels(number))
        update(optimizer, means(gradients), model.trainable_variables)
        bad, logits = validate(rows(9), labels(9))
        accuracy.update_state(labels(9), logits.merge())
        same += [loss.reduce_mean(), bad.reduce_mean(), accuracy.result()]
    return ended(same, model)


def branch_on_the_loss(side: Side) -> Found:
    """Python decides by the loss whether to update, and by a gradient's norm how far."""
    model, same = two_halves(side), []
    optimizer, compute = tf.keras.optimizers.SGD(0.1), computing(side, model)
    for number in range(4):
        gradients, loss = compute(rows(number))
        found = means(gradients)
        if loss.reduce_mean() > 0.25:
            norms = [float(tf.norm(each)) for each in found]
            largest = model.trainable_variables[int(np.argmax(norms))]
            optimizer.learning_rate.assign(0.1 / max(norms))
            update(optimizer, found, model.trainable_variables)
            largest.assign(0.9 * largest)
            same += [np.float32(norms)]
        same.append(loss.reduce_mean())
    return ended(same, model)


def mixed_up(side: Side) -> Found:
    """Mixup: a permuted batch, weights of a Beta by NumPy, two losses; a curriculum of sizes."""
    model, draws = two_halves(side, 3, None), np.random.RandomState(4)

    def loss_of(model: Any, x: Any, y: Any, z: Any, part: Any) -> Any:
        logits = model(x, training=True)
        return tf.reduce_mean(part) * entropy(y, logits) + (1.0 - tf.reduce_mean(part)) * entropy(
            z, logits
        )

    batches = []
    for number, size in enumerate((4, 8, 8)):
        order, part = draws.permutation(size), np.float32(draws.beta(0.4, 0.4))
        x, y = rows(number)[:size], labels(number)[:size]
        mixed = part * x + (1.0 - part) * tf.gather(x, order)
        batches.append((mixed, y, tf.gather(y, order), tf.fill([size], part)))
    return loop(side, model, loss_of, batches)


NAMES = names_of(globals(), "validated_between")
