"""Uses of tapes as users write them: several over one pass, tapes in tapes; see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import apply, of_layers, two_halves

L = tf.keras.layers


def _trained(side: Side, compute: Any, *models: Any, steps: int = 3) -> Found:
    """Trains models with an optimizer each; a step returns gradients for each, then losses."""
    optimizers = [tf.keras.optimizers.SGD(0.05) for _ in models]
    same: list[Any] = []
    for number in range(steps):
        *gradients, losses = compute(rows(number), rows(number + 10))
        for optimizer, model, own in zip(optimizers, models, gradients, strict=True):
            apply(optimizer, model, [each.accumulate() for each in own])
        same += [loss.reduce_mean() for loss in losses]
    variables = [variable for model in models for variable in model.variables]
    return Found(same, by_name(variables, variables))


def _generator(side: Side) -> Any:
    return of_layers(
        side,
        L.Dense(WIDTH, use_bias=False, name="g_one"),
        L.BatchNormalization(name="g_norm"),
        L.LeakyReLU(name="g_relu"),
        L.Dense(WIDTH, "tanh", name="g_two"),
    )


def _critic(side: Side, *more: Any) -> Any:
    return of_layers(
        side,
        L.Dense(WIDTH, "tanh", name="c_one"),
        *more,
        L.Dense(WIDTH, "tanh", name="c_two"),
        L.Dense(1, name="c_three"),
    )


def _norm() -> Any:
    # Of two rows each, between which there may be next to nothing: rounding would be all.
    return L.BatchNormalization(epsilon=0.5, name="c_norm")


def _adversaries(side: Side, generator: Any, critic: Any) -> Found:
    cross = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @side.step
    def compute(images: Any, noise: Any) -> Any:
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_critic:
            made = generator(noise, training=True)
            real, fake = critic(images, training=True), critic(made, training=True)
            wins = cross(tf.ones_like(fake), fake)
            loss = cross(tf.ones_like(real), real) + cross(tf.zeros_like(fake), fake)
        return (
            of_generator.gradient(wins, generator.trainable_variables),
            of_critic.gradient(loss, critic.trainable_variables),
            [wins, loss],
        )

    return _trained(side, compute, generator, critic)


def two_tapes(side: Side) -> Found:
    """A generator and a critic, with a tape each over one forward pass."""
    return _adversaries(side, _generator(side), _critic(side))


def two_tapes_and_a_state(side: Side) -> Found:
    """The same with a critic that normalises."""
    return _adversaries(side, _generator(side), _critic(side, _norm()))


def one_tape_twice(side: Side) -> Found:
    """A tape that is asked for the gradients of each of two losses, whose norms then weigh."""
    model = two_halves(side)

    @side.step
    def compute(x: Any, z: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = model(x, training=True)
            losses = [tf.reduce_mean(tf.square(y)), tf.reduce_mean(tf.abs(y - z))]
        first, second = [tape.gradient(loss, model.trainable_variables) for loss in losses]
        return [a + 0.5 * b for a, b in zip(first, second, strict=True)], losses

    return _trained(side, compute, model)


def trained_on_adversaries(side: Side) -> Found:
    """Examples moved by the sign of their gradient, and a training on them in the same step."""
    model = two_halves(side)

    @side.step
    def compute(x: Any, z: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(model(x, training=True) - z))
        moved = x + 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            harder = tf.reduce_mean(tf.square(model(moved, training=True) - z))
        return tape.gradient(harder, model.trainable_variables), [loss, harder]

    return _trained(side, compute, model)


def examples_moved_often(side: Side) -> Found:
    """The same with three moves, each after the last one, and the loss of both in the end."""
    model = two_halves(side)

    @side.step
    def compute(x: Any, z: Any) -> Any:
        def loss_of(value: Any) -> Any:
            return tf.reduce_mean(tf.square(model(value, training=True) - z))

        moved = x
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(moved)
                loss = loss_of(moved)
            moved = x + 0.1 * tf.tanh(tape.gradient(loss, moved))
        with tf.GradientTape() as tape:
            losses = [loss_of(x), loss_of(tf.stop_gradient(moved))]
            loss = losses[0] + losses[1]
        return tape.gradient(loss, model.trainable_variables), losses

    return _trained(side, compute, model)


def _penalized(side: Side, critic: Any, shape: Any = None, training: bool = True) -> Found:
    """Trains a critic whose gradient by what it judges is to have norm 1, as in WGAN-GP."""

    @side.step
    def compute(real: Any, fake: Any) -> Any:
        real, fake = (each if shape is None else tf.reshape(each, shape) for each in (real, fake))
        with tf.GradientTape() as tape:
            between = 0.4 * real + 0.6 * fake
            with tf.GradientTape() as inner:
                inner.watch(between)
                judged = critic(between, training=training)
            gradient = tf.reshape(inner.gradient(judged, between), [-1, WIDTH])
            norm = tf.sqrt(tf.reduce_sum(tf.square(gradient), 1) + 1e-12)
            penalty = tf.reduce_mean(tf.square(norm - 1.0))
            loss = tf.reduce_mean(critic(fake, training=True) - critic(real, training=True))
            loss += 10.0 * penalty
        return tape.gradient(loss, critic.trainable_variables), [loss, penalty]

    return _trained(side, compute, critic)


def penalty_on_gradients(side: Side) -> Found:
    """A critic of dense layers."""
    return _penalized(side, _critic(side))


def penalty_with_state(side: Side) -> Found:
    """A critic that normalises by its batches, and so changes statistics that nothing reads."""
    return _penalized(side, _critic(side, _norm()))


def penalty_on_sequences(side: Side) -> Found:
    """A critic of convolutions."""
    layers = [
        L.Conv1D(3, 2, activation="tanh", name="c_conv"),
        L.LayerNormalization(name="c_norm"),
        L.Flatten(),
        L.Dense(1, name="c_end"),
    ]
    return _penalized(side, of_layers(side, *layers), (-1, WIDTH, 1))


def penalty_on_a_loop(side: Side) -> Found:
    """A recurrent critic."""
    layers = [L.SimpleRNN(3, name="c_rnn"), L.Dense(1, name="c_end")]
    return _penalized(side, of_layers(side, *layers), (-1, WIDTH, 1))


def penalty_with_dropout(side: Side) -> Found:
    """A critic that draws numbers, other ones in each call."""
    return _penalized(side, _critic(side, L.Dropout(0.3, seed=1)))


def penalty_with_noise(side: Side) -> Found:
    """A critic that draws numbers from TensorFlow's generator."""
    return _penalized(side, _critic(side, L.Lambda(lambda x: tf.nn.dropout(x, 0.3))))


def penalty_without_dropout(side: Side) -> Found:
    """The same, which draws none where the gradients are for the penalty."""
    return _penalized(side, _critic(side, L.Dropout(0.0)), training=False)


def penalty_at_examples(side: Side) -> Found:
    """A penalty on the gradients of a loss that trains as well: one pass, two requests."""
    critic = _critic(side)

    @side.step
    def compute(real: Any, fake: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch([real, fake])
                loss = tf.reduce_mean(tf.nn.softplus(-critic(real)) + tf.nn.softplus(critic(fake)))
            gradients = inner.gradient(loss, [real, fake])
            whole = loss + tf.add_n([tf.reduce_sum(tf.square(each)) for each in gradients])
        return tape.gradient(whole, critic.trainable_variables), [loss, whole]

    return _trained(side, compute, critic)


def gradients_in_a_loss(side: Side) -> Found:
    """A derivative of the model by its input that is to be like the data, and no other loss."""
    model = two_halves(side)

    @side.step
    def compute(x: Any, z: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = model({"x": x}["x"])
            slope = inner.gradient(y, x)
            loss = tf.reduce_mean(tf.square(slope - z))
        return tape.gradient(loss, model.trainable_variables), [loss]

    return _trained(side, compute, model)


def gradients_by_weights_again(side: Side) -> Found:
    """A loss of gradients by weights, as where a model learns to learn."""
    model = two_halves(side)

    @side.step
    def compute(x: Any, z: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.square(model(x) - z))
            own = inner.gradient(loss, model.trainable_variables)
            whole = loss + tf.add_n([tf.reduce_sum(tf.square(each)) for each in own])
        return tape.gradient(whole, model.trainable_variables), [loss]

    return _trained(side, compute, model)


#: What gives the numbers of TensorFlow.
NAMES = (
    "two_tapes",
    "two_tapes_and_a_state",
    "one_tape_twice",
    "trained_on_adversaries",
    "examples_moved_often",
    "penalty_on_gradients",
    "penalty_with_state",
    "penalty_on_sequences",
    "penalty_on_a_loop",
    "penalty_without_dropout",
    "penalty_at_examples",
    "gradients_in_a_loss",
)
