"""Uses of Keras's own loop, as users write them, see ``tf_beside``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH
from tf_users import IS_KERAS_3, class_of_halves, dense, model_of

L = tf.keras.layers


def _fit_data() -> tuple[Any, Any]:
    x = np.random.RandomState(0).standard_normal((32, WIDTH)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def _histories(model: Any, *found: Any) -> Found:
    same = [np.array(each.history[key], np.float32) for each in found for key in each.history]
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def _classifier(side: Side) -> Any:
    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    return model_of(side, call, first=dense("first"), second=dense("second", 1, "sigmoid"))


def fit_with_metrics(side: Side) -> Found:
    """Metrics of all kinds, one of one's own, and a validation split."""

    class Largest(tf.keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_weight(name="value", initializer="zeros", shape=())

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(tf.maximum(tf.convert_to_tensor(self.value), tf.reduce_max(y_pred)))

        def result(self) -> Any:
            return tf.convert_to_tensor(self.value)

    model = _classifier(side)
    metrics = ["accuracy", tf.keras.metrics.AUC(name="auc"), "mse", Largest()]
    model.compile("adam", "binary_crossentropy", metrics=metrics)
    x, y = _fit_data()
    return _histories(
        model,
        model.fit(x, y, epochs=2, batch_size=8, validation_split=0.25, shuffle=False, verbose=0),
    )


def fit_from_generators(side: Side) -> Found:
    """A Python generator with a number of steps, and a sequence of batches."""
    x, y = _fit_data()
    base = getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)

    class Batches(base):  # type: ignore[misc, valid-type]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> Any:
            return x[8 * place : 8 * place + 8], y[8 * place : 8 * place + 8]

    def generator() -> Any:
        while True:
            for place in range(4):
                yield x[8 * place : 8 * place + 8], y[8 * place : 8 * place + 8]

    model = _classifier(side)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    first = model.fit(generator(), steps_per_epoch=4, epochs=2, verbose=0)
    second = model.fit(Batches(), epochs=4, initial_epoch=2, shuffle=False, verbose=0)
    return _histories(model, first, second)


def fit_with_callbacks(side: Side) -> Found:
    """Rates, logs, stops, and a callback that predicts."""
    seen: list[Any] = []
    x, y = _fit_data()

    class Predicting(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.predict(x[:8], verbose=0))
            seen.append(np.float32(self.model.evaluate(x, y, batch_size=8, verbose=0)))

    model = _classifier(side)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    with tempfile.TemporaryDirectory() as folder:
        history = model.fit(
            x,
            y,
            batch_size=8,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[
                Predicting(),
                tf.keras.callbacks.ReduceLROnPlateau(
                    "loss", patience=0, min_delta=10.0, factor=0.5
                ),
                tf.keras.callbacks.TerminateOnNaN(),
                tf.keras.callbacks.CSVLogger(str(Path(folder, "log.csv"))),
            ],
        )
    found = _histories(model, history)
    return Found([*found.same, *seen], found.own)


def batches_by_hand(side: Side) -> Found:
    """``train_on_batch``, ``test_on_batch`` and ``predict_on_batch``."""
    model = _classifier(side)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    x, y = _fit_data()
    same: list[Any] = []
    for place in range(3):
        part = slice(8 * place, 8 * place + 8)
        same.append(np.float32(model.train_on_batch(x[part], y[part])))
    same.append(np.float32(model.test_on_batch(x[:8], y[:8])))
    same.append(np.array(model.predict_on_batch(x[:8])))
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def fit_several_steps_an_execution(side: Side) -> Found:
    """``steps_per_execution``: several batches in one graph."""
    model = _classifier(side)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse", steps_per_execution=2)
    x, y = _fit_data()
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return _histories(model, history)


def fit_small_last_batch(side: Side) -> Found:
    """The last batch of an epoch is smaller, also smaller than the microbatches (Keras 3)."""
    model = _classifier(side)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    same: list[Any] = []
    for count in (29, 27) if IS_KERAS_3 else (29,):
        x, y = (each[:count] for each in _fit_data())
        options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        found = _histories(model, model.fit(x, y, validation_data=(x, y), **options))
        same += [*found.same, model.predict(x, batch_size=8, verbose=0)]
    return found._replace(same=same)


def fit_functional(side: Side) -> Found:
    """A functional model with a regularizer, a frozen normalisation, and losses by name."""
    inputs = tf.keras.Input((WIDTH,))
    norm = L.BatchNormalization(name="norm")
    x = L.Dense(8, "relu", kernel_regularizer="l2", name="first")(inputs)
    x = norm(x)
    norm.trainable = False
    x = L.Concatenate()([x, inputs])
    model = tf.keras.Model(inputs, [L.Dense(1, name="second")(x), L.Dense(1, name="third")(x)])
    if side.base is not tf.keras.Model:
        model = side.base(model)
    model.compile(tf.keras.optimizers.SGD(0.1), {"third": "mae", "second": "mse"})
    features, y = _fit_data()
    history = model.fit(features, (y, -y), batch_size=8, epochs=2, shuffle=False, verbose=0)
    found = _histories(model, history)
    return found._replace(same=[*found.same, *sorted(history.history)])


def own_train_step(side: Side) -> Found:
    """A model with a ``train_step`` of its own, as the guides of Keras show it."""

    class Model(class_of_halves(side, 1)):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Model()
    model.compile(tf.keras.optimizers.SGD(0.5))
    x, y = _fit_data()
    return _histories(model, model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))


#: What gives the numbers of TensorFlow.
NAMES = (
    "fit_with_metrics",
    "fit_from_generators",
    "fit_with_callbacks",
    "batches_by_hand",
    "fit_several_steps_an_execution",
    "fit_small_last_batch",
    "fit_functional",
)
