"""Networks of many architectures, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from making import given, numbers, tokens
from tf_beside import Found, Side
from tf_calls import WIDTH, rows
from tf_users import dense, model_of, of_layers, train

L = tf.keras.layers
TIMES = 5


def branches(side: Side) -> Found:
    """Inception: branches that are joined, with skips over several layers."""
    inputs = tf.keras.Input((8, 8, 3))
    x = skip = L.Conv2D(8, 3, padding="same", activation="tanh")(inputs)
    for _ in range(2):
        ways = [L.Conv2D(4, size, padding="same")(x) for size in (1, 3)]
        ways.append(L.Conv2D(4, 1)(L.AveragePooling2D(2, 1, padding="same")(x)))
        x = L.Conv2D(8, 1, activation="tanh")(L.Concatenate()(ways))
    x = L.Average()([x, skip])
    outputs = L.Dense(3)(L.GlobalAveragePooling2D()(L.Multiply()([x, skip])))
    return train(side, given(side, tf.keras.Model(inputs, outputs)), numbers(8, 8, 3))


def u_net(side: Side) -> Found:
    """Down and up again, with what was on the way down."""
    inputs = tf.keras.Input((16, 16, 2))
    kept, x = [], inputs
    for width in (4, 8):
        x = L.Conv2D(width, 3, padding="same", activation="tanh")(x)
        kept.append(x)
        x = L.MaxPooling2D()(x)
    x = L.Conv2D(8, 3, padding="same", activation="tanh")(x)
    for width, skip in zip((8, 4), reversed(kept), strict=True):
        x = L.Conv2DTranspose(width, 2, strides=2)(x)
        x = L.Conv2D(width, 3, padding="same", activation="tanh")(L.Concatenate()([x, skip]))
    model = tf.keras.Model(inputs, L.Conv2D(1, 1)(L.UpSampling2D(2)(L.ZeroPadding2D()(x))))
    return train(side, given(side, model), numbers(16, 16, 2))


def convolutions(side: Side) -> Found:
    """Separable, depthwise, dilated and causal convolutions, and pooling of all kinds."""
    model = of_layers(
        side,
        L.Conv1D(6, 2, dilation_rate=2, padding="causal", name="causal"),
        L.SeparableConv1D(6, 3, padding="same", name="separable"),
        L.Cropping1D(1),
        L.Reshape((6, 6, 1)),
        L.DepthwiseConv2D(2, depth_multiplier=2, name="depthwise"),
        L.Permute((3, 1, 2)),
        L.Conv2D(4, 2, strides=2, name="strided"),
        L.Reshape((1, 2, 1, 4)),
        L.Conv3D(3, (1, 2, 1), name="three"),
        L.GlobalMaxPooling3D(),
    )
    return train(side, model, numbers(8, 6))


def encoder_decoder(side: Side) -> Found:
    """The states of one recurrence begin another one, on the other half."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            _, *states = model.encoder(x)
        with side.part(1):
            return model.head(model.decoder(x[:, ::-1], initial_state=states))

    model = model_of(
        side,
        call,
        encoder=lambda: L.LSTM(6, return_state=True, name="encoder"),
        decoder=lambda: L.LSTM(6, return_sequences=True, name="decoder"),
        head=dense("head"),
    )
    return train(side, model, numbers(TIMES, WIDTH))


def teacher_forcing(side: Side) -> Found:
    """A decoder in a Python loop, with attention to the encoder's states."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            memory = model.encoder(model.table(x))
        with side.part(1):
            state, results = memory[:, -1], []
            for time in range(TIMES):
                read = model.attention([state[:, tf.newaxis], memory])[:, 0]
                state = model.cell(model.table(x[:, time]) + read, [state])[0]
                results.append(model.head(state))
            return tf.stack(results, 1)

    model = model_of(
        side,
        call,
        table=lambda: L.Embedding(9, 6, name="table"),
        encoder=lambda: L.GRU(6, return_sequences=True, name="encoder"),
        attention=lambda: L.AdditiveAttention(name="attention"),
        cell=lambda: L.GRUCell(6, name="cell"),
        head=dense("head"),
    )
    return train(side, model, tokens(9, TIMES))


def experts(side: Side) -> Found:
    """Rows go to experts of both halves as a gate says; how many is known in the step only."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            chances = tf.nn.softmax(model.gate(x))
            chosen = tf.argmax(chances, -1, tf.int32)
            parts = tf.dynamic_partition(x, chosen, 2)
            places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), chosen, 2)
            one = model.one(parts[0])
        with side.part(1):
            other = model.other(parts[1])
            y = tf.dynamic_stitch(places, [one, other])
            return y * tf.gather(chances, chosen, batch_dims=1)[:, tf.newaxis]

    model = model_of(
        side, call, gate=dense("gate", 2, None), one=dense("one"), other=dense("other")
    )
    return train(side, model, rows())


def graph_network(side: Side) -> Found:
    """Messages along edges, summed at their ends."""
    edges = tf.constant([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]])

    def send(layer: Any, x: Any) -> Any:
        ends = tf.gather(x, edges, axis=1)
        messages = layer(tf.concat([ends[:, :, 0], ends[:, :, 1]], -1))
        return tf.transpose(
            tf.math.unsorted_segment_sum(tf.transpose(messages, [1, 0, 2]), edges[:, 1], 4),
            [1, 0, 2],
        )

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = send(model.first, x)
        with side.part(1):
            return send(model.second, x)

    model = model_of(side, call, first=dense("first"), second=dense("second"))
    return train(side, model, numbers(4, WIDTH))


def hyper_network(side: Side) -> Found:
    """One half makes the weights with which the other one computes."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            matrix = tf.reshape(model.maker(x), [-1, WIDTH, WIDTH])
        with side.part(1):
            return model.head(tf.linalg.matvec(matrix, x))

    model = model_of(side, call, maker=dense("maker", WIDTH * WIDTH), head=dense("head"))
    return train(side, model, rows())


def flow(side: Side) -> Found:
    """A normalising flow with determinants, and a differential equation in fixed steps."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            left, right = tf.split(x, 2, -1)
            scale, shift = tf.split(model.couple(left), 2, -1)
            x = tf.concat([left, right * tf.exp(scale) + shift], -1)
        with side.part(1):
            for _ in range(3):
                slope = model.slope(x)
                x = x + 0.1 * model.slope(x + 0.05 * slope)
            spread = tf.matmul(x[:, :, tf.newaxis], x[:, tf.newaxis]) + tf.eye(WIDTH)
            return x + (tf.linalg.slogdet(spread)[1] + tf.reduce_sum(scale, -1))[:, tf.newaxis]

    model = model_of(side, call, couple=dense("couple"), slope=dense("slope"))
    return train(side, model, rows())


def variational(side: Side) -> Found:
    """Means and variances, given noise, and the divergence as a loss of the model."""

    def call(model: Any, x: Any, training: Any) -> Any:
        x, noise = x[:, :2], x[:, 2:]
        with side.part(0):
            mean, spread = tf.split(model.encoder(x), 2, -1)
            z = mean + noise * tf.exp(0.5 * spread)
            divergence = 1.0 + spread - tf.square(mean) - tf.exp(spread)
            model.add_loss(-0.5 * tf.reduce_mean(divergence))
        with side.part(1):
            return model.decoder(z)

    model = model_of(side, call, encoder=dense("encoder"), decoder=dense("decoder", 2))
    return train(side, model, rows())


#: What gives the numbers of TensorFlow.
NAMES = (
    "branches",
    "u_net",
    "convolutions",
    "encoder_decoder",
    "teacher_forcing",
    "experts",
    "graph_network",
    "hyper_network",
    "flow",
    "variational",
)
