"""Habits of whole networks, see ``tf_habits``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side
from tf_calls import WIDTH, rows
from tf_habits import (
    TIMES,
    batches,
    entropy,
    labels,
    loop,
    names_of,
    numbers,
    square,
    words,
    wrapped,
)
from tf_users import IS_KERAS_3, dense, model_of, of_layers

L = tf.keras.layers


def autoencoder_with_sampling(side: Side) -> Found:
    """VAE: seeded draws and the divergence by ``add_loss`` in ``call``."""

    class Sampling(L.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="sampling")
            if IS_KERAS_3:
                self.seeds = tf.keras.random.SeedGenerator(7)

        def call(self, given: Any) -> Any:
            mean, log = given
            self.add_loss(-0.5 * tf.reduce_mean(1.0 + log - mean**2 - tf.exp(log)))
            if not IS_KERAS_3:
                return mean
            noise = tf.keras.random.normal(tf.shape(mean), seed=self.seeds)
            return mean + tf.exp(0.5 * log) * noise

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            h = model.body(x)
            z = model.sampling((model.mean(h), model.log(h)))
        with side.part(1):
            return model.decoder(z)

    layers = {
        "body": dense("body"),
        "mean": dense("mean", 3, None),
        "log": dense("log", 3, None),
        "sampling": Sampling,
        "decoder": dense("decoder", WIDTH, None),
    }
    model = model_of(side, call, **layers)

    def loss_of(model: Any, x: Any) -> Any:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - x))
        return loss + 0.1 * tf.add_n(model.losses)

    return loop(side, model, loss_of, batches(rows))


def quantized_by_a_codebook(side: Side) -> Found:
    """VQ-VAE: nearest codes, straight through, both losses in the layer."""

    class Quantizer(L.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="quantizer")
            init = tf.keras.initializers.RandomUniform(-1, 1, seed=2)
            self.codes = self.add_weight(name="codes", shape=(WIDTH, 6), initializer=init)

        def call(self, x: Any) -> Any:
            codes = tf.convert_to_tensor(self.codes)
            far = (
                tf.reduce_sum(x**2, 1, keepdims=True)
                + tf.reduce_sum(codes**2, 0)
                - 2.0 * tf.matmul(x, codes)
            )
            chosen = tf.one_hot(tf.argmin(far, 1), 6)
            found = tf.matmul(chosen, codes, transpose_b=True)
            self.add_loss(
                0.25 * tf.reduce_mean((tf.stop_gradient(found) - x) ** 2)
                + tf.reduce_mean((found - tf.stop_gradient(x)) ** 2)
            )
            return x + tf.stop_gradient(found - x)

    model = of_layers(side, L.Dense(WIDTH, name="in"), Quantizer(), L.Dense(WIDTH, name="out"))

    def loss_of(model: Any, x: Any) -> Any:
        return tf.reduce_mean((model(x, training=True) - x) ** 2) + sum(model.losses)

    return loop(side, model, loss_of, batches(rows))


def decoder_with_masks(side: Side) -> Found:
    """A decoder: padding and the future masked, a table of positions, tied to its words."""

    class Block(L.Layer):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.attention = L.MultiHeadAttention(2, 3, dropout=0.0, name="attention")
            self.norms = [L.LayerNormalization(name=f"norm_{each}") for each in range(2)]
            self.inner = tf.keras.Sequential(
                [L.Dense(8, "gelu", name="up"), L.Dense(WIDTH, name="down")], name="inner"
            )

        def call(self, x: Any, mask: Any = None, training: Any = None) -> Any:
            times = tf.shape(x)[1]
            past = tf.linalg.band_part(tf.ones([times, times], tf.bool), -1, 0)[None]
            if mask is not None:
                past = past & tf.cast(mask, tf.bool)[:, None]
            y = self.norms[0](x)
            x = x + self.attention(y, y, attention_mask=past, training=training)
            return x + self.inner(self.norms[1](x))

    def call(model: Any, words: Any, training: Any) -> Any:
        mask = tf.not_equal(words, 0)
        with side.part(0):
            x = model.words(words) + model.places(tf.range(TIMES))
            x = model.first(x, mask=mask, training=training)
        with side.part(1):
            x = model.last(model.second(x, mask=mask, training=training))
        with side.part(0):
            return tf.matmul(x, model.words.embeddings, transpose_b=True)

    model = model_of(
        side,
        call,
        words=lambda: L.Embedding(7, WIDTH, name="words"),
        places=lambda: L.Embedding(TIMES, WIDTH, name="places"),
        first=lambda: Block("first"),
        second=lambda: Block("second"),
        last=lambda: L.LayerNormalization(name="last"),
    )

    def loss_of(model: Any, words: Any) -> Any:
        logits = model(words, training=True)[:, :-1]
        later = words[:, 1:]
        each = tf.keras.losses.sparse_categorical_crossentropy(later, logits, from_logits=True)
        mask = tf.cast(later != 0, tf.float32)
        return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)

    return loop(side, model, loss_of, batches(words), tf.keras.optimizers.Adam(0.01))


def words_of_both_ends(side: Side) -> Found:
    """T5: one table for encoder, decoder and results, cross attention, two inputs."""

    def call(model: Any, given: Any, training: Any) -> Any:
        source, target = given
        with side.part(0):
            x = model.words(source)
            x = x + model.encoder(x, x)
        with side.part(1):
            y = model.words(target)
            y = y + model.decoder(y, y, use_causal_mask=True)
            y = y + model.cross(y, x)
            return tf.einsum("btw,vw->btv", y, tf.convert_to_tensor(model.words.embeddings))

    def attention(name: str) -> Any:
        return lambda: L.MultiHeadAttention(2, 2, name=name)

    model = model_of(
        side,
        call,
        words=lambda: L.Embedding(7, WIDTH, name="words"),
        encoder=attention("encoder"),
        decoder=attention("decoder"),
        cross=attention("cross"),
    )

    def loss_of(model: Any, source: Any, target: Any) -> Any:
        return entropy(target[:, 1:], model((source, target[:, :-1]), training=True))

    return loop(side, model, loss_of, batches(words, lambda number: words(number + 4)))


def translated_with_states(side: Side) -> Found:
    """Seq2seq: an encoder's states start the decoder, a loop of Python feeds cells."""

    def call(model: Any, given: Any, training: Any) -> Any:
        source, target = given
        with side.part(0):
            _, *states = model.encoder(model.words(source), mask=tf.not_equal(source, 0))
        with side.part(1):
            found = []
            for time in range(3):
                x, states = model.cell(model.later_words(target[:, time]), states)
                found.append(model.head(x))
            return tf.stack(found, 1)

    model = model_of(
        side,
        call,
        words=lambda: L.Embedding(7, WIDTH, name="words"),
        later_words=lambda: L.Embedding(7, WIDTH, name="later_words"),
        encoder=lambda: L.LSTM(WIDTH, return_state=True, name="encoder"),
        cell=lambda: L.LSTMCell(WIDTH, name="cell"),
        head=dense("head", 7, None),
    )

    def loss_of(model: Any, source: Any, target: Any) -> Any:
        return entropy(target[:, 1:4], model((source, target), training=True))

    return loop(side, model, loss_of, batches(words, lambda number: words(number + 4)))


def aligned_by_ctc(side: Side) -> Found:
    """CTC over a bidirectional layer, lengths of each example."""
    model = of_layers(
        side,
        L.Bidirectional(L.GRU(3, return_sequences=True, name="gru"), name="ways"),
        L.Dense(4, name="head"),
    )

    def loss_of(model: Any, x: Any, said: Any, length: Any) -> Any:
        logits = tf.transpose(model(x, training=True), [1, 0, 2])
        times = tf.fill(tf.shape(length), TIMES)
        return tf.reduce_mean(
            tf.nn.ctc_loss(said, logits, length, times, blank_index=0, logits_time_major=True)
        )

    def said(number: int) -> Any:
        return tf.constant(np.random.RandomState(number).randint(1, 4, (8, 2)), tf.int32)

    lengths = tf.constant([1, 2] * 4)
    batches = [(numbers(n, TIMES, 3), said(n), lengths) for n in range(3)]
    return loop(side, model, loss_of, batches)


def experts_by_hand(side: Side) -> Found:
    """A sparse mixture: the two best experts of each row, a balancing loss, one on each half."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            gates = tf.nn.softmax(model.gate(x))
            weights, chosen = tf.math.top_k(gates, 2)
            weights = weights / tf.reduce_sum(weights, -1, keepdims=True)
            spread = tf.reduce_sum(tf.one_hot(chosen, 3) * weights[..., None], 1)
            load = tf.reduce_mean(gates, 0) * tf.reduce_mean(tf.one_hot(chosen[:, 0], 3), 0)
            found = spread[:, :1] * model.experts[0](x)
        with side.part(1):
            for place in (1, 2):
                found += spread[:, place : place + 1] * model.experts[place](x)
            return model.head(found), 3.0 * tf.reduce_sum(load)

    model = model_of(
        side,
        call,
        gate=dense("gate", 3, None),
        experts=lambda: [L.Dense(WIDTH, "relu", name=f"expert_{each}") for each in range(3)],
        head=dense("head", 3, None),
    )

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        logits, load = model(x, training=True)
        return entropy(y, logits) + 0.1 * load

    return loop(side, model, loss_of, batches(rows, labels))


def nodes_and_edges(side: Side) -> Found:
    """A graph network: a dict of nodes and edges, ``segment_sum`` and ``scatter_nd``."""

    def call(model: Any, given: Any, training: Any) -> Any:
        nodes, begin, end = given["nodes"], given["begin"], given["end"]
        with side.part(0):
            sent = tf.gather(model.send(nodes), begin)
            got = tf.math.unsorted_segment_sum(sent, end, tf.shape(nodes)[0])
            x = model.norm(nodes + got)
        with side.part(1):
            sent = tf.gather(model.again(x), begin)
            got = tf.scatter_nd(end[:, None], sent, tf.shape(x))
            return model.head(tf.concat([x, got], -1))

    model = model_of(
        side,
        call,
        send=dense("send"),
        again=dense("again"),
        norm=lambda: L.LayerNormalization(name="norm"),
        head=dense("head", 2, None),
    )

    def loss_of(model: Any, nodes: Any, begin: Any, end: Any) -> Any:
        given = {"nodes": nodes, "begin": begin, "end": end}
        return tf.reduce_mean(tf.square(model(given, training=True) - 0.2))

    begin, end = tf.constant([0, 1, 2, 3] * 2), tf.constant([1, 0, 3, 3] * 2)
    return loop(side, model, loss_of, [(rows(n), begin, end) for n in range(3)])


def shared_in_three_ways(side: Side) -> Found:
    """A layer called twice, a model in a model called on two inputs, a weight transposed."""
    one, other = tf.keras.Input((WIDTH,), name="one"), tf.keras.Input((WIDTH,), name="other")
    shared = L.Dense(WIDTH, "tanh", name="shared")
    inside = tf.keras.Input((WIDTH,))
    inner = tf.keras.Model(inside, shared(L.Dense(WIDTH, name="in")(shared(inside))), name="inner")
    joined = L.Multiply()([inner(one), inner(other), shared(one)])
    ends = {"sum": L.Dense(1, name="sum")(joined), "code": L.Activation("tanh")(inner(joined))}
    model = wrapped(side, tf.keras.Model({"one": one, "other": other}, ends))

    def loss_of(model: Any, one: Any, other: Any) -> Any:
        found = model({"one": one, "other": other}, training=True)
        return tf.reduce_mean(found["sum"] ** 2) + tf.reduce_mean(tf.abs(found["code"] - 0.2))

    return loop(side, model, loss_of, batches(rows, lambda number: rows(number + 5)))


def skipped_connections(side: Side) -> Found:
    """A U-Net of a class: skips in a list, transposed convolutions, cropping and padding."""

    def call(model: Any, x: Any, training: Any) -> Any:
        skips = []
        with side.part(0):
            for down in model.downs:
                x = down(x)
                skips.append(x)
                x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        with side.part(1):
            for up, skip in zip(model.ups, reversed(skips), strict=True):
                x = up(x)[:, : skip.shape[1], : skip.shape[2]]
                x = tf.concat([x, skip], -1)
            return model.head(x)

    def convolutions(kind: Any, name: str, **options: Any) -> Any:
        return lambda: [
            kind(3, 3, padding="same", activation="relu", name=f"{name}_{each}", **options)
            for each in range(2)
        ]

    model = model_of(
        side,
        call,
        downs=convolutions(L.Conv2D, "down"),
        ups=convolutions(L.Conv2DTranspose, "up", strides=2),
        head=lambda: L.Conv2D(1, 1, name="head"),
    )
    return loop(side, model, square, batches(lambda number: numbers(number, 6, 6, 1)))


NAMES = names_of(globals())
