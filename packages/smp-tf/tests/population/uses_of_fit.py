"""Uses of ``fit`` as users write them, see ``tf_beside``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from making import computing, given
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH
from tf_users import apply, class_of_halves, dense, model_of, two_halves

L = tf.keras.layers
ROWS = 32


def _data() -> tuple[Any, Any]:
    x = np.random.RandomState(0).standard_normal((ROWS, WIDTH)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def _found(model: Any, *histories: Any) -> Found:
    same: list[Any] = []
    for each in histories:
        for key in sorted(each.history):
            same += [key, np.array(each.history[key], np.float32)]
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def step_in_a_train_step(side: Side) -> Found:
    """A ``train_step`` of one's own that calls a step function, in ``fit``, with a metric."""

    class Model(class_of_halves(side, 1)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = tf.keras.metrics.Mean(name="mean")

        def train_step(self, data: Any) -> Any:
            gradients, loss = compute(*data)
            means = [each.accumulate() for each in gradients]
            apply(self.optimizer, self, means)
            self.mean.update_state(loss.reduce_mean())
            return {"mean": self.mean.result()}

    model = Model()
    compute = computing(
        side, model, lambda model, x, y: tf.reduce_mean(tf.abs(model(x, training=True) - y))
    )
    x, y = _data()
    if side.base is tf.keras.Model:
        model(x)
    model.compile(tf.keras.optimizers.SGD(0.5))
    found = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    own = by_name(model.trainable_variables, model.trainable_variables)
    return Found([np.array(found.history["mean"], np.float32)], own)


def fit_a_loss_of_ones_own(side: Side) -> Found:
    """A ``compute_loss`` that adds to Keras's, and evaluation by it."""

    class Model(class_of_halves(side, 1)):  # type: ignore[misc]
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
        ) -> Any:
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            return loss + 0.1 * tf.reduce_mean(tf.abs(y_pred))

    model = Model()
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    x, y = _data()
    found = _found(model, model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    return found._replace(same=[*found.same, np.float32(model.evaluate(x, y, verbose=0))])


def fit_weighted_examples(side: Side) -> Found:
    """Weights of examples as an array, weighted metrics, and validation with weights."""
    model = two_halves(side, 1, "sigmoid")
    loss = tf.keras.losses.BinaryCrossentropy(label_smoothing=0.1)
    model.compile("rmsprop", loss, metrics=["mae"], weighted_metrics=["accuracy"])
    x, y = _data()
    weights = np.linspace(0.1, 3.0, ROWS).astype("float32")
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        sample_weight=weights,
        validation_data=(x[:16], y[:16], weights[:16]),
        shuffle=False,
        verbose=0,
    )
    return _found(model, history)


def fit_masked_sequences(side: Side) -> Found:
    """Outputs of which some times are masked, which the loss leaves out."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.table(x)
        with side.part(1):
            return model.head(model.cell(x))

    model = model_of(
        side,
        call,
        table=lambda: L.Embedding(5, WIDTH, mask_zero=True, name="table"),
        cell=lambda: L.LSTM(WIDTH, return_sequences=True, name="cell"),
        head=dense("head", 1),
    )
    model.compile(tf.keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    x = np.random.RandomState(0).randint(1, 5, (ROWS, 6))
    # As many in each microbatch; ``tf_fit.masked`` has others.
    x[np.arange(6) >= np.tile([[3], [6]], (ROWS // 2, 1))] = 0
    y = np.random.RandomState(2).standard_normal((ROWS, 6, 1)).astype("float32")
    return _found(model, model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))


def fit_repeated_data(side: Side) -> Found:
    """A dataset without an end, batches a number of steps, prefetched, with validation steps."""
    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), tf.keras.losses.Huber(), metrics=["mse"])
    data = tf.data.Dataset.from_tensor_slices(_data()).batch(8).repeat().prefetch(2)
    options = {"validation_data": data, "validation_steps": 2, "validation_freq": 2}
    return _found(model, model.fit(data, epochs=4, steps_per_epoch=3, verbose=0, **options))


def fit_eagerly(side: Side) -> Found:
    """``run_eagerly``, and losses of one's own with penalties of layers."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    model = model_of(
        side,
        call,
        first=dense("first", kernel_regularizer=tf.keras.regularizers.L1(0.01)),
        second=dense("second", 1, activity_regularizer=tf.keras.regularizers.L2(0.01)),
    )
    model.compile(
        tf.keras.optimizers.Adam(0.05),
        lambda y, found: tf.reduce_mean(tf.abs(y - found) ** 1.5, -1),
        run_eagerly=True,
    )
    return _found(model, model.fit(*_data(), batch_size=8, epochs=2, shuffle=False, verbose=0))


def fit_that_freezes(side: Side) -> Found:
    """A callback changes the rate in each batch, and freezes a layer for the next ``fit``."""

    class Changing(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rate = self.model.optimizer.learning_rate
            rate.assign(rate * 0.9)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.first.trainable = False

    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [Changing()]}
    first = model.fit(*_data(), epochs=2, **options)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    second = model.fit(*_data(), epochs=1, **options)
    model.first.trainable = True
    return _found(model, first, second)


def fit_logged(side: Side) -> Found:
    """A log, losses of batches, and an early stop."""
    seen: list[float] = []
    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            tf.keras.callbacks.CSVLogger(str(Path(folder, "log.csv"))),
            tf.keras.callbacks.EarlyStopping("loss", patience=1),
            tf.keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda _, logs: seen.append(logs["loss"])
            ),
        ]
        options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        history = model.fit(*_data(), epochs=4, **options)
    found = _found(model, history)
    return found._replace(same=[*found.same, np.array(seen, np.float32)])


def fit_that_restores(side: Side) -> Found:
    """An early stop that puts the best weights back."""
    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    # So large a rate that the loss rises again would make much of rounding.
    stop = tf.keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=10.0, restore_best_weights=True
    )
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [stop]}
    return _found(model, model.fit(*_data(), epochs=4, **options))


def fit_with_checkpoints(side: Side) -> Found:
    """Weights written after each epoch by Keras."""
    model = two_halves(side, 1)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "{epoch}.weights.h5"))
        callbacks = [tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True)]
        options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        return _found(model, model.fit(*_data(), epochs=2, **options))


def fit_tuples_and_dicts(side: Side) -> Found:
    """A functional model with inputs as a tuple and a dict, and losses by place and by name."""
    ends = [tf.keras.Input((WIDTH,), name=name) for name in ("left", "right")]
    x = L.Concatenate()([L.Dense(6, "tanh", name=f"of_{n}")(e) for n, e in enumerate(ends)])
    outputs = [L.Dense(1, name="a")(x), L.Dense(2, "softmax", name="b")(x)]
    model = tf.keras.Model(ends, outputs)
    model = given(side, model)
    model.compile("sgd", ["mse", "sparse_categorical_crossentropy"], loss_weights=[1.0, 0.2])
    x, y = _data()
    targets = (y, y[:, 0].astype("int64"))
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    histories = [model.fit(pair, targets, **options) for pair in ([x, 2.0 * x], (x, -x))]
    losses = {"b": "sparse_categorical_crossentropy", "a": "mse"}
    model.compile("sgd", losses, loss_weights={"a": 0.5, "b": 2.0})
    by_names = {"right": x, "left": 3.0 * x}
    histories.append(model.fit(by_names, targets, **options))
    results = model.predict([x[:8], x[8:16]], verbose=0)
    found = _found(model, *histories)
    return found._replace(same=[*found.same, *(np.array(each) for each in results)])


def text_in(side: Side) -> Found:
    """Words, as strings, through a vectorisation inside of the model, in ``fit``."""
    words = np.array([["the cat sat"], ["the dog ran far"], ["a cat"], ["dog dog dog"]] * 8)
    vectors = L.TextVectorization(output_sequence_length=4, name="vectors")
    vectors.adapt(words)

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.table(model.vectors(x))
        with side.part(1):
            return model.head(tf.reduce_mean(x, 1))

    model = model_of(
        side,
        call,
        vectors=lambda: vectors,
        table=lambda: L.Embedding(12, WIDTH, name="table"),
        head=dense("head", 1, "sigmoid"),
    )
    model.compile(tf.keras.optimizers.Adam(0.1), "binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((words, _data()[1])).batch(8)
    return _found(model, model.fit(data, epochs=2, verbose=0))


#: What gives the numbers of TensorFlow.
NAMES = (
    "step_in_a_train_step",
    "fit_a_loss_of_ones_own",
    "fit_weighted_examples",
    "fit_masked_sequences",
    "fit_repeated_data",
    "fit_eagerly",
    "fit_that_freezes",
    "fit_logged",
    "fit_that_restores",
    "fit_with_checkpoints",
    "fit_tuples_and_dicts",
    "text_in",
)
