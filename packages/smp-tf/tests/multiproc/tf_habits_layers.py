"""Habits of models and layers, see ``tf_habits``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_beside import Found, Side
from tf_calls import WIDTH, rows
from tf_habits import (
    batches,
    classify,
    computing,
    ended,
    entropy,
    labels,
    loop,
    means,
    names_of,
    numbers,
    square,
    update,
    words,
    wrapped,
)
from tf_users import IS_KERAS_3, dense, model_of, of_layers

L = tf.keras.layers


def normalised_in_all_ways(side: Side) -> Found:
    """Batch, layer, group, unit and spectral normalisation in one network of images."""
    layers = [
        L.Conv2D(4, 3, padding="same", name="conv"),
        L.BatchNormalization(momentum=0.7, name="batch"),
        L.GroupNormalization(2, name="group"),
        L.LayerNormalization(axis=[1, 2, 3], name="layer"),
        L.Flatten(name="flat"),
        L.UnitNormalization(name="unit"),
    ]
    if IS_KERAS_3:
        layers.append(L.SpectralNormalization(L.Dense(3, name="inner"), name="spectral"))
    model = of_layers(side, *layers)
    return loop(side, model, square, batches(lambda number: numbers(number, 4, 4, 2)))


def frames_in_order(side: Side) -> Found:
    """ConvLSTM with states of the one before, time-distributed layers, a cell of one's own."""

    class Cell(L.Layer):  # type: ignore[misc]
        state_size = output_size = 3

        def build(self, shape: Any) -> None:
            self.inner = self.add_weight(name="inner", shape=(shape[-1], 3))
            self.again = self.add_weight(name="again", shape=(3, 3))

        def call(self, x: Any, states: Any, training: Any = None) -> Any:
            h = tf.tanh(tf.matmul(x, self.inner) + tf.matmul(states[0], self.again))
            return h, [h]

    model = of_layers(
        side,
        L.ConvLSTM1D(2, 3, padding="same", return_sequences=True, name="frames"),
        L.TimeDistributed(L.Flatten(name="flat"), name="each"),
        L.RNN(Cell(name="cell"), name="own"),
        L.Dense(2, name="head"),
    )
    return loop(side, model, square, batches(lambda number: numbers(number, 3, 4, 2)))


def remembered_between_batches(side: Side) -> Found:
    """A stateful layer over three batches, reset once, read by ``states``."""
    inputs = tf.keras.Input((3, 2), batch_size=4)
    recurrent = L.LSTM(3, stateful=True, name="recurrent")
    model = wrapped(side, tf.keras.Model(inputs, L.Dense(1, name="head")(recurrent(inputs))))
    return loop(side, model, square, batches(lambda number: numbers(number, 3, 2)))


def ragged_text(side: Side) -> Found:
    """Rows of unlike length inside of the model: from a dense batch, by their lengths."""

    def call(model: Any, given: Any, training: Any) -> Any:
        words, length = given
        with side.part(0):
            ragged = tf.RaggedTensor.from_tensor(words, lengths=length)
            vectors = tf.ragged.map_flat_values(
                lambda each: tf.gather(tf.convert_to_tensor(model.table.embeddings), each), ragged
            )
            x = tf.reduce_mean(vectors, 1)
        with side.part(1):
            return model.head(x)

    class Table(L.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="table")
            self.embeddings = self.add_weight(name="embeddings", shape=(7, WIDTH))

    model = model_of(side, call, table=Table, head=dense("head", 3, None))

    def loss_of(model: Any, words: Any, length: Any, y: Any) -> Any:
        return entropy(y, model((words, length), training=True))

    lengths = tf.constant([1, 3, 5, 2] * 2, tf.int64)
    batches = [(words(n), lengths, labels(n)) for n in range(3)]
    return loop(side, model, loss_of, batches)


def counted_calls(side: Side) -> Found:
    """Counters of integers, a best value, a buffer of the last rows: state of layers."""

    class Keeping(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            options = {"trainable": False, "initializer": "zeros"}
            self.calls = self.add_weight(name="calls", shape=(), dtype="int32", **options)
            self.most = self.add_weight(name="most", shape=(), **options)
            self.last = self.add_weight(name="last", shape=(2, shape[-1]), **options)
            self.gain = self.add_weight(name="gain", shape=(), initializer="ones")

        def call(self, x: Any, training: Any = None) -> Any:
            if training:
                self.calls.assign_add(1)
                self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.abs(x))))
                x = x + 0.1 * tf.reduce_mean(self.last, 0)
                self.last.assign(tf.concat([self.last[1:], x[-1:]], 0))
            scale = 1.0 / tf.cast(1 + self.calls, tf.float32)
            return x * self.gain * (1.0 + scale)

    model = of_layers(
        side,
        L.Dense(WIDTH, name="a"),
        Keeping(name="one"),
        L.Dense(WIDTH, name="b"),
        Keeping(name="other"),
    )
    return loop(side, model, square, batches(rows))


def branches_of_graphs(side: Side) -> Found:
    """``tf.cond``, ``tf.while_loop`` and ``tf.switch_case`` in layers, by values and weights."""

    class Turning(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.one = self.add_weight(name="one", shape=(shape[-1], shape[-1]))
            self.other = self.add_weight(name="other", shape=(shape[-1],))

        def call(self, x: Any) -> Any:
            x = tf.cond(
                tf.reduce_mean(x) > 0.0,
                lambda: tf.matmul(x, self.one),
                lambda: x * self.other,
            )
            _, x = tf.while_loop(
                lambda step, x: (step < 3) & (tf.norm(x) < 1e3),
                lambda step, x: (step + 1, tf.tanh(tf.matmul(x, self.one)) + x),
                (0, x),
            )
            which = tf.cast(tf.reduce_sum(x) > 1.0, tf.int32)
            return tf.switch_case(which, [lambda: x, lambda: x * 0.5])

    layers = [L.Dense(WIDTH, name="a"), Turning(name="t"), Turning(name="u")]
    return loop(side, of_layers(side, *layers), square, batches(rows))


def checked_and_printed(side: Side) -> Found:
    """``tf.print``, ``tf.debugging`` and ``tf.py_function`` in layers and in the step."""

    class Checking(L.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            tf.debugging.assert_all_finite(x, "finite")
            tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 1e6)
            tf.print("x", tf.shape(x), output_stream="file:///dev/null")
            y = tf.py_function(lambda v: tf.tanh(v) * 2.0, [x], tf.float32)
            y.set_shape(x.shape)
            return y

    model = of_layers(side, L.Dense(WIDTH, name="a"), Checking(name="c"), L.Dense(2, name="b"))

    def loss_of(model: Any, x: Any) -> Any:
        y = model(x, training=True)
        tf.debugging.assert_shapes([(x, ("n", WIDTH)), (y, ("n", 2))])
        with tf.control_dependencies([tf.debugging.assert_near(y, y)]):
            return tf.reduce_mean(tf.square(y))

    return loop(side, model, loss_of, batches(rows))


def weights_normalised(side: Side) -> Found:
    """A wrapper that keeps direction and length, started from the layer's kernel; constraints."""

    class Normed(L.Layer):  # type: ignore[misc]
        def __init__(self, layer: Any, name: str) -> None:
            super().__init__(name=name)
            self.layer = layer

        def build(self, shape: Any) -> None:
            self.layer.build(shape)
            self.length = self.add_weight(name="length", shape=(WIDTH,), initializer="ones")

        def call(self, x: Any) -> Any:
            kernel = tf.math.l2_normalize(tf.convert_to_tensor(self.layer.kernel), 0) * self.length
            return tf.matmul(x, kernel) + self.layer.bias

    of = tf.keras.constraints
    model = of_layers(
        side,
        Normed(L.Dense(WIDTH, name="in"), "n"),
        L.Dense(WIDTH, kernel_constraint=of.UnitNorm(), bias_constraint=of.NonNeg(), name="b"),
        L.Dense(2, kernel_constraint=of.MinMaxNorm(0.2, 0.4), name="c"),
    )
    return loop(side, model, square, batches(rows))


def sparse_tables(side: Side) -> Found:
    """Two towers of embeddings, a dot product, Adagrad on sparse gradients, negative samples."""

    def call(model: Any, given: Any, training: Any) -> Any:
        with side.part(0):
            user = model.users(given["user"]) + model.ages(given["age"])
        with side.part(1):
            item = model.items(given["item"])
            return tf.einsum("bw,bnw->bn", user, item) + model.bias(given["item"])[..., 0]

    def table(name: str, count: int, width: int = WIDTH) -> Any:
        return lambda: L.Embedding(count, width, name=name)

    model = model_of(
        side,
        call,
        users=table("users", 9),
        ages=table("ages", 4),
        items=table("items", 11),
        bias=table("bias", 11, 1),
    )

    def loss_of(model: Any, user: Any, age: Any, item: Any) -> Any:
        scores = model({"user": user, "age": age, "item": item}, training=True)
        return tf.reduce_mean(tf.nn.softplus(scores[:, 1:] - scores[:, :1]))

    batches = [(labels(n, 9), labels(n + 1, 4), labels(n + 2, 11, 3)) for n in range(3)]
    return loop(side, model, loss_of, batches, tf.keras.optimizers.Adagrad(0.1))


def layers_that_differ_in_training(side: Side) -> Found:
    """Noise, spatial dropout and stochastic depth with seeds, off and on in turns."""

    class Depth(L.Layer):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__(name="depth")
            self.inner, self.drop = inner, L.Dropout(0.3, noise_shape=(None, 1), seed=4)

        def call(self, x: Any, training: Any = None) -> Any:
            return x + self.drop(self.inner(x), training=training)

    model = of_layers(
        side,
        L.GaussianNoise(0.1, seed=2, name="noise"),
        Depth(L.Dense(WIDTH, name="in")),
        L.Dropout(0.2, seed=3, name="drop"),
        L.Dense(2, name="head"),
    )
    quiet = side.step(lambda x: model(x, training=False))
    same = [quiet(rows()).merge()]
    compute, optimizer = computing(side, model), tf.keras.optimizers.SGD(0.1)
    for number in range(2):
        gradients, loss = compute(rows(number))
        update(optimizer, means(gradients), model.trainable_variables)
        same += [loss.reduce_mean(), quiet(rows()).merge()]
    return ended(same, model)


def frozen_by_weights(side: Side) -> Found:
    """A nested model is frozen but for its normalisation, then its last layer trains."""
    base = tf.keras.Sequential(
        [
            tf.keras.Input((WIDTH,)),
            L.Dense(WIDTH, "tanh", name="a"),
            L.BatchNormalization(name="norm"),
            L.Dense(WIDTH, "tanh", name="b"),
        ],
        name="base",
    )
    base.trainable = False
    base.get_layer("norm").trainable = True
    inputs = tf.keras.Input((WIDTH,))
    ends = L.Dense(3, name="head")(base(inputs, training=False))
    model = wrapped(side, tf.keras.Model(inputs, ends))
    same: list[Any] = []
    for stage in range(2):
        found = loop(side, model, classify, batches(rows, labels, count=2))
        same += [*found.same, len(model.trainable_variables)]
        if stage == 0:
            base.trainable = True
            for layer in base.layers[:-1]:
                layer.trainable = False
    return ended(same, model)


NAMES = names_of(globals(), "layers_that_differ_in_training")
