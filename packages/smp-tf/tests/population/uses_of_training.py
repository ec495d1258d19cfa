"""Loops of training as users write them, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from making import computing, numbers, square, tokens
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import apply, dense, model_of, train, two_halves

L = tf.keras.layers


def optimizers_of_all_kinds(side: Side) -> Found:
    """Whatever optimizers Keras has, one after the other, on one model."""
    names = ("RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion", "Adafactor")
    same, model = [], two_halves(side)
    for name in names:
        kind = getattr(tf.keras.optimizers, name, None)
        if kind is not None:
            found = train(side, model, rows(), kind(0.01), steps=2)
            same += found.same
    return Found(same, found.own)


def slices_clipped(side: Side) -> Found:
    """Embeddings, of which a batch has rows twice, with each way to clip and some optimizers."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.table(x)
        with side.part(1):
            return model.head(x + model.other(tf.argmax(x, -1)))

    same: list[Any] = []
    tables = {name: lambda n=name: L.Embedding(WIDTH, WIDTH, name=n) for name in ("table", "other")}
    model = model_of(side, call, head=dense("head"), **tables)
    for clip in ({}, {"clipnorm": 0.01}, {"clipvalue": 0.01}, {"global_clipnorm": 0.01}):
        for name in ("Adam", "SGD", "Adagrad"):
            optimizer = getattr(tf.keras.optimizers, name)(0.1, **clip)
            found = train(side, model, tokens(WIDTH, 3), optimizer, steps=2)
            same += found.same
    return Found(same, found.own)


def rate_of_ones_own(side: Side) -> Found:
    """A class of schedules, with a warm-up, and the norm of all gradients clipped."""

    class WarmUp(tf.keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __call__(self, step: Any) -> Any:
            step = tf.cast(step, tf.float32) + 1.0
            return 0.1 * tf.minimum(step**-0.5, step * 0.5)

    optimizer = tf.keras.optimizers.Adam(WarmUp(), global_clipnorm=0.05)
    return train(side, two_halves(side), rows(), optimizer, steps=4)


def accumulated_by_hand(side: Side) -> Found:
    """Gradients of three batches are added up in variables, then applied."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.5)
    compute = computing(side, model, square)
    kept: list[Any] = []
    losses = []
    for number in range(6):
        gradients, loss = compute(rows(number))
        means = [each.accumulate() for each in gradients]
        if not kept:
            kept = [tf.Variable(tf.zeros_like(each), trainable=False) for each in means]
        for total, mean in zip(kept, means, strict=True):
            total.assign_add(mean / 3.0)
        if number % 3 == 2:
            apply(optimizer, model, [tf.convert_to_tensor(each) for each in kept])
            for total in kept:
                total.assign(tf.zeros_like(total))
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def averaged_weights(side: Side) -> Found:
    """Moving averages of the weights, swapped in at the end."""
    model, optimizer = two_halves(side), tf.keras.optimizers.SGD(0.5)
    compute, losses = computing(side, model, square), []
    averages: list[Any] = []
    for number in range(4):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        now = [tf.convert_to_tensor(each) for each in model.trainable_variables]
        averages = [0.5 * a + 0.5 * b for a, b in zip(averages or now, now, strict=True)]
        losses.append(loss.reduce_mean())
    for variable, average in zip(model.trainable_variables, averages, strict=True):
        variable.assign(average)
    losses.append(compute(rows())[1].reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def two_optimizers(side: Side) -> Found:
    """Two groups of weights with a rate each, by the names of their layers."""
    model = two_halves(side)
    slow, fast = tf.keras.optimizers.SGD(0.01), tf.keras.optimizers.Adam(0.1)
    compute, losses = computing(side, model, square), []
    for number in range(3):
        gradients, loss = compute(rows(number))
        means = [each.accumulate() for each in gradients]
        pairs = list(zip(means, model.trainable_variables, strict=True))
        kernels = [pair for pair in pairs if len(pair[1].shape) == 2]
        others = [pair for pair in pairs if len(pair[1].shape) != 2]
        fast.apply_gradients(kernels)
        slow.apply_gradients(others)
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def contrastive(side: Side) -> Found:
    """Two views through one model in one step, and similarities of all pairs."""
    model = two_halves(side)

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        one, other = (tf.math.l2_normalize(model(each), -1) for each in (x, y))
        scores = tf.matmul(one, other, transpose_b=True) / 0.1
        labels = tf.range(tf.shape(x)[0])
        return tf.reduce_mean(
            tf.keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
        )

    compute, losses = computing(side, model, loss_of), []
    optimizer = tf.keras.optimizers.SGD(0.1)
    for number in range(2):
        gradients, loss = compute(rows(number), rows(number + 5))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def distillation(side: Side) -> Found:
    """A teacher of plain Keras, whole on each process, called in the body of the step."""
    teacher = tf.keras.Sequential([L.Dense(WIDTH, "tanh", name="wise")], name="teacher")
    teacher.build((None, WIDTH))

    def loss_of(model: Any, x: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x) - teacher(x, training=False)))

    model = two_halves(side)
    compute, losses = computing(side, model, loss_of), []
    optimizer = tf.keras.optimizers.Adam(0.1)
    for number in range(3):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def attacked(side: Side) -> Found:
    """A step for the gradient of the inputs, and one that trains on what it moved."""
    model = two_halves(side)

    @side.step
    def attack(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = square(model, x)
        return x + 0.1 * tf.sign(tape.gradient(loss, x))

    compute, losses = computing(side, model, square), []
    optimizer = tf.keras.optimizers.SGD(0.1)
    for number in range(2):
        gradients, loss = compute(attack(rows(number)).concat())
        apply(optimizer, model, [each.accumulate() for each in gradients])
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def rewards(side: Side) -> Found:
    """Policy gradients: probabilities of actions that were taken, weighted, with an entropy."""

    def loss_of(model: Any, x: Any, taken: Any, reward: Any) -> Any:
        chances = tf.nn.log_softmax(model(x))
        of_taken = tf.gather(chances, taken, batch_dims=1)
        entropy = -tf.reduce_sum(tf.exp(chances) * chances, -1)
        return -tf.reduce_mean(of_taken * tf.stop_gradient(reward) + 0.01 * entropy)

    model = two_halves(side)
    compute, losses = computing(side, model, loss_of), []
    optimizer = tf.keras.optimizers.RMSprop(0.05)
    reward = tf.constant(np.linspace(-1.0, 1.0, 8), tf.float32)
    for _ in range(3):
        gradients, loss = compute(rows(), tokens(WIDTH), reward)
        apply(optimizer, model, [each.accumulate() for each in gradients])
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def alignments(side: Side) -> Found:
    """The CTC loss of sequences, and a beam search in evaluation."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.cell(x)
        with side.part(1):
            return model.head(x)

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        logits = tf.transpose(model(x), [1, 0, 2])
        count = tf.shape(x)[0]
        lengths = tf.fill([count], 6)
        return tf.reduce_mean(
            tf.nn.ctc_loss(y, logits, tf.fill([count], 2), lengths, blank_index=0)
        )

    model = model_of(
        side,
        call,
        cell=lambda: L.Bidirectional(L.LSTM(4, return_sequences=True), name="cell"),
        head=dense("head", 4, None),
    )
    compute, losses = computing(side, model, loss_of), []
    optimizer = tf.keras.optimizers.SGD(0.1)
    for _ in range(2):
        gradients, loss = compute(numbers(6, WIDTH), tokens(2, 2) + 1)
        apply(optimizer, model, [each.accumulate() for each in gradients])
        losses.append(loss.reduce_mean())
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def evaluated_between(side: Side) -> Found:
    """Training and evaluation in turns, with normalisations, in steps of their own."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.one(model.first(x), training=training)
        with side.part(1):
            return model.other(model.second(x), training=training)

    model = model_of(
        side,
        call,
        first=dense("first"),
        one=lambda: L.BatchNormalization(name="one"),
        second=dense("second"),
        other=lambda: L.BatchNormalization(name="other"),
    )
    evaluate = side.step(lambda x: model(x, training=False))
    compute, same = computing(side, model, square), []
    optimizer = tf.keras.optimizers.SGD(0.1)
    for number in range(3):
        gradients, loss = compute(rows(number))
        apply(optimizer, model, [each.accumulate() for each in gradients])
        same += [loss.reduce_mean(), evaluate(rows()).concat()]
    return Found(same, by_name(model.variables, model.variables))


#: What gives the numbers of TensorFlow.
NAMES = (
    "optimizers_of_all_kinds",
    "slices_clipped",
    "rate_of_ones_own",
    "accumulated_by_hand",
    "averaged_weights",
    "two_optimizers",
    "contrastive",
    "distillation",
    "attacked",
    "rewards",
    "alignments",
    "evaluated_between",
)
