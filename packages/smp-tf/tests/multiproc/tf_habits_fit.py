"""Habits of scripts that train by ``fit``, and what they do around it, see ``tf_habits``."""

from __future__ import annotations

import contextlib
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side
from tf_calls import WIDTH, rows
from tf_habits import FIT, computing, data, ended, means, names_of, told, update, wrapped
from tf_users import IS_KERAS_3, class_of_halves, dense, model_of, two_halves

L = tf.keras.layers
C = tf.keras.callbacks


def _functional(side: Side, width: int = 1, end: Any = None) -> Any:
    inputs = tf.keras.Input((WIDTH,), name="rows")
    x = L.Dense(WIDTH, "tanh", name="a")(inputs)
    x = L.LayerNormalization(name="norm")(x)
    return wrapped(side, tf.keras.Model(inputs, L.Dense(width, end, name="head")(x)))


def _compiled(side: Side, optimizer: Any = None, **options: Any) -> Any:
    model = _functional(side)
    model.compile(optimizer or tf.keras.optimizers.SGD(0.1), "mse", **options)
    return model


def fit_own_steps(side: Side) -> Found:
    """``train_step`` and ``test_step`` with step functions, trackers as ``metrics``."""

    class Model(class_of_halves(side, 1, None)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen = tf.keras.metrics.Mean(name="seen")
            self.error = tf.keras.metrics.MeanAbsoluteError(name="error")

        @property
        def metrics(self) -> Any:
            return [self.seen, self.error]

        def train_step(self, given: Any) -> Any:
            x, y = given
            gradients, loss, found = train(x, y)
            update(self.optimizer, means(gradients), self.trainable_variables)
            self.seen.update_state(loss.reduce_mean())
            self.error.update_state(y, found.merge())
            return {each.name: each.result() for each in self.metrics}

        def test_step(self, given: Any) -> Any:
            x, y = given
            loss, found = test(x, y)
            self.seen.update_state(loss.reduce_mean())
            self.error.update_state(y, found.merge())
            return {each.name: each.result() for each in self.metrics}

    model = Model()

    @side.step
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = tf.reduce_mean(tf.square(y - found))
        return tape.gradient(loss, model.trainable_variables), loss, found

    @side.step
    def test(x: Any, y: Any) -> Any:
        found = model(x, training=False)
        return tf.reduce_mean(tf.square(y - found)), found

    model.compile(tf.keras.optimizers.Adam(0.05))
    x, y = data()
    if side.base is tf.keras.Model:
        model(x)
    history = model.fit(x, y, epochs=2, validation_data=(x[:16], y[:16]), **FIT)
    return told(model, history, *model.evaluate(x, y, batch_size=8, verbose=0))


def fit_own_loss_and_metrics(side: Side) -> Found:
    """``compute_loss`` and ``compute_metrics`` of a subclass, with ``add_loss`` in a layer."""

    class Model(class_of_halves(side, 1, None)):  # type: ignore[misc]
        def call(self, x: Any, training: Any = None) -> Any:
            found = super().call(x, training=training)
            self.add_loss(0.1 * tf.reduce_mean(tf.square(found)))
            return found

        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            **options: Any,
        ) -> Any:
            return tf.reduce_mean(tf.abs(y - y_pred)) + tf.add_n(self.losses)

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            found = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**found, "twice": 2.0 * found["loss"]}

    model = Model()
    model.compile(tf.keras.optimizers.SGD(0.1), metrics=["mae"])
    return told(model, model.fit(*data(), epochs=2, **FIT))


def fit_best_weights(side: Side) -> Found:
    """``EarlyStopping`` puts the best weights back, ``ModelCheckpoint`` wrote them."""
    model = _compiled(side, tf.keras.optimizers.SGD(0.3))
    x, y = data()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "{epoch}.weights.h5"))
        each = [
            C.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            C.ModelCheckpoint(path, save_weights_only=True, save_best_only=True),
        ]
        options = {"validation_data": (x[:8], y[:8]), "callbacks": each, "epochs": 6}
        history = model.fit(x, y, **options, **FIT)
        stopped = each[0].stopped_epoch
    again = model.evaluate(x[:8], y[:8], batch_size=8, verbose=0)
    return told(model, history, stopped, again)


def fit_backed_up(side: Side) -> Found:
    """``BackupAndRestore``: ends by an error in the second epoch, goes on in a second model."""

    class Failing(C.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise InterruptedError("ends")

    x, y = data()
    with tempfile.TemporaryDirectory() as folder:
        model = _compiled(side, tf.keras.optimizers.Adam(0.05))
        options = {"epochs": 4, **FIT}
        with contextlib.suppress(InterruptedError):
            model.fit(x, y, callbacks=[C.BackupAndRestore(folder), Failing()], **options)
        model = _compiled(side, tf.keras.optimizers.Adam(0.05))
        history = model.fit(x, y, callbacks=[C.BackupAndRestore(folder)], **options)
    return told(model, history, len(history.history["loss"]))


def fit_watched_by_callbacks(side: Side) -> Found:
    """Callbacks that read weights, slots and rates, change them, and stop the training."""
    seen: list[Any] = []

    class Watching(C.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(np.float32(len(self.model.layers)))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            first = self.model.trainable_variables[0]
            norm = float(tf.norm(first))
            if norm > 0.5:
                first.assign(first * (0.5 / norm))
            seen.append(np.float32([norm, logs["loss"]]))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            optimizer.learning_rate.assign(float(optimizer.learning_rate) * 0.9)
            every = optimizer.variables if IS_KERAS_3 else optimizer.variables()
            seen.append(np.float32([np.abs(np.asarray(each)).sum() for each in every]))
            self.model.stop_training = epoch == 2

    model = two_halves(side, 1, None)
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    history = model.fit(*data(), epochs=5, callbacks=[Watching()], **FIT)
    if not IS_KERAS_3:
        seen = []
    return told(model, history, *seen)


def fit_logged_in_files(side: Side) -> Found:
    """``CSVLogger``, a log of JSON lines, ``TerminateOnNaN``, ``LambdaCallback``."""
    model = _compiled(side, metrics=["mae"])
    with tempfile.TemporaryDirectory() as folder:
        table, lines = Path(folder, "log.csv"), Path(folder, "log.json")

        def write(epoch: int, logs: Any) -> None:
            with lines.open("a") as file:
                file.write(json.dumps({"epoch": epoch, "loss": float(logs["loss"])}) + "\n")

        each = [C.CSVLogger(str(table)), C.TerminateOnNaN(), C.LambdaCallback(on_epoch_end=write)]
        history = model.fit(*data(), epochs=2, callbacks=each, **FIT)
        with table.open() as file:
            found = [float(line["mae"]) for line in csv.DictReader(file)]
        found += [json.loads(line)["loss"] for line in lines.read_text().splitlines()]
    return told(model, history, np.float32(found))


def fit_in_stages(side: Side) -> Found:
    """A frozen body, compiled again, ``initial_epoch``, predictions in between."""
    model = _compiled(side)
    x, y = data()
    model.layers[1].trainable = False
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    first = model.fit(x, y, epochs=2, **FIT)
    same = [model.predict(x, batch_size=8, verbose=0)]
    model.layers[1].trainable = True
    model.compile(tf.keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
    second = model.fit(x, y, epochs=4, initial_epoch=2, **FIT)
    same += [np.float32(first.history["loss"]), model.predict_on_batch(x[:8])]
    return told(model, second, *same)


def fit_own_sequence(side: Side) -> Found:
    """Batches from a ``Sequence`` of one's own, with weights, ``steps_per_epoch``."""
    x, y = data()

    class Batches(tf.keras.utils.Sequence):  # type: ignore[misc]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, place: int) -> Any:
            part = slice(8 * place, 8 * place + 8)
            return x[part], y[part], np.linspace(0.1, 1.0, 8, dtype="float32")

    model = _compiled(side, weighted_metrics=["mae"])
    options = {"shuffle": False, "verbose": 0}
    return told(model, model.fit(Batches(), epochs=2, steps_per_epoch=2, **options))


def fit_uneven(side: Side) -> Found:
    """A last batch that is smaller, ``validation_split``, several executions a call."""
    model = _compiled(side, steps_per_execution=2) if IS_KERAS_3 else _compiled(side)
    x, y = data(count=40)
    return told(model, model.fit(x, y, epochs=2, validation_split=0.2, **FIT))


def fit_clipped(side: Side) -> Found:
    """``global_clipnorm`` with ``AdamW``, a mean of weights, a norm as a metric of one's own."""

    class Norm(tf.keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="size")
            self.total = self.add_weight(name="total", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.norm(y_pred))

        def result(self) -> Any:
            return self.total + 0.0

    optimizer = tf.keras.optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.1)
    model = _compiled(side, optimizer, metrics=[Norm()])
    return told(model, model.fit(*data(), epochs=2, **FIT))


def fit_averaged(side: Side) -> Found:
    """``use_ema`` with ``SwapEMAWeights`` where there is one, evaluated in between."""
    optimizer = tf.keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)
    model = _compiled(side, optimizer)
    x, y = data()
    history = model.fit(x, y, epochs=2, validation_data=(x, y), **FIT)
    return told(model, history, model.evaluate(x, y, batch_size=8, verbose=0))


def fit_in_halves(side: Side) -> Found:
    """``mixed_float16`` with its scale in ``fit``, an end in single precision."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        inputs = tf.keras.Input((WIDTH,))
        x = L.Dense(WIDTH, "tanh", name="a")(inputs)
        ends = L.Dense(1, dtype="float32", name="head")(x)
        model = wrapped(side, tf.keras.Model(inputs, ends))
        # A smaller one than Keras's, since one process overflows sooner: it has no microbatches.
        scaling = tf.keras.mixed_precision.LossScaleOptimizer
        optimizer = scaling(tf.keras.optimizers.SGD(0.01), initial_scale=2.0**9)
        model.compile(optimizer, "mse")
        history = model.fit(*data(), epochs=2, **FIT)
        same = [np.round(np.float32(history.history["loss"]), 1)]
        kinds = sorted({str(np.asarray(each).dtype) for each in model.get_weights()})
        return Found([*same, kinds], {})
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def fit_several_ends(side: Side) -> Found:
    """Losses and weights by names of results, a metric each, class weights of a result."""
    inputs = {"a": tf.keras.Input((WIDTH,), name="a"), "b": tf.keras.Input((WIDTH,), name="b")}
    x = L.Concatenate()([L.Dense(WIDTH, name="of_a")(inputs["a"]), inputs["b"]])
    x = L.Dense(WIDTH, "relu", name="both")(x)
    ends = {"kind": L.Dense(3, name="kind")(x), "size": L.Dense(1, name="size")(x)}
    model = wrapped(side, tf.keras.Model(inputs, ends))
    kind = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        tf.keras.optimizers.SGD(0.1),
        loss={"kind": kind, "size": tf.keras.losses.Huber()},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x, y = data()
    targets = {"kind": np.arange(24) % 3, "size": y}
    history = model.fit({"a": x, "b": x[::-1].copy()}, targets, epochs=2, **FIT)
    return told(model, history, *model.predict({"a": x, "b": x}, verbose=0).values())


def weights_in_a_second_model(side: Side) -> Found:
    """``save_weights`` of a trained model, ``load_weights`` in a new one, trained on."""
    x, y = data()
    model = _compiled(side)
    first = model.fit(x, y, epochs=1, **FIT)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "of.weights.h5"))
        model.save_weights(path)
        tf.keras.backend.clear_session()
        other = _compiled(side)
        other.load_weights(path)
    same = [np.float32(first.history["loss"]), other.predict(x, batch_size=8, verbose=0)]
    return told(other, other.fit(x, y, epochs=1, **FIT), *same)


def layers_given_weights(side: Side) -> Found:
    """``layer.get_weights`` and ``set_weights`` between models, ``get_layer``, ``count_params``."""
    x, y = data()
    model, other = _compiled(side), _compiled(side)
    history = model.fit(x, y, epochs=1, **FIT)
    other.predict(x[:8], batch_size=8, verbose=0)
    for name in ("a", "norm", "head"):
        other.get_layer(name).set_weights(model.get_layer(name).get_weights())
    same = [other.evaluate(x, y, batch_size=8, verbose=0), other.count_params()]
    kernel = model.get_layer("head").kernel
    same += [np.asarray(kernel), float(tf.reduce_sum(tf.square(kernel)))]
    return told(other, history, *same)


def checkpoint_of_a_second_model(side: Side) -> Found:
    """The library's checkpoints (TensorFlow's without it) hold model, optimizer and a counter."""

    def made() -> Any:
        model, optimizer = two_halves(side), tf.keras.optimizers.Adam(0.05)
        return model, optimizer, tf.Variable(0, name="count", dtype=tf.int64)

    def train(model: Any, optimizer: Any, count: Any, turns: int) -> list[Any]:
        compute = computing(side, model)
        losses = []
        for _ in range(turns):
            gradients, loss = compute(rows(int(count)))
            update(optimizer, means(gradients), model.trainable_variables)
            count.assign_add(1)
            losses.append(loss.reduce_mean())
        return losses

    def manager(folder: str, model: Any, optimizer: Any, count: Any) -> Any:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, count=count)
        if side.base is tf.keras.Model:
            return tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        import smdistributed.modelparallel.tensorflow as smp

        return smp.CheckpointManager(checkpoint, folder, max_to_keep=2)

    with tempfile.TemporaryDirectory() as folder:
        folder = _of_all(side, folder)
        first = made()
        same = train(*first, 2)
        manager(folder, *first).save()
        same += train(*first, 1)
        tf.keras.backend.clear_session()
        second = made()
        if side.base is tf.keras.Model:
            second[0](rows())
            second[1].build(second[0].trainable_variables)
            manager(folder, *second).restore_or_initialize()
        else:
            manager(folder, *second).restore()
        same += train(*second, 2)
    return ended([*same, second[2] + 0], second[0])


def _of_all(side: Side, folder: str) -> str:
    """Returns a folder that all processes have."""
    if side.base is tf.keras.Model:
        return folder
    import smdistributed.modelparallel.tensorflow as smp

    return str(smp.allgather(folder, smp.PP_GROUP)[0])


def told_about(side: Side) -> Found:
    """``summary``, ``get_config``, names and counts of weights, before and after training."""
    model = _compiled(side)
    lines: list[str] = []
    model.summary(print_fn=lambda line, **options: lines.append(line))
    history = model.fit(*data(), epochs=1, **FIT)
    same = [
        *(np.float32(len(each)) for each in (model.weights, model.trainable_weights)),
        np.float32(len(model.non_trainable_weights)),
        np.float32(sum(int(np.prod(each.shape)) for each in model.trainable_weights)),
        [each.name for each in model.trainable_weights],
    ]
    return told(model, history, *same)


def penalties_of_layers(side: Side) -> Found:
    """Regularizers of kernels and activities, constraints, and their sum as ``model.losses``."""
    of = tf.keras.regularizers
    layers = [
        L.Dense(WIDTH, kernel_regularizer=of.L2(0.1), bias_regularizer="l1", name="a"),
        L.Dense(WIDTH, activity_regularizer=of.L1(0.01), name="b"),
        L.Dense(1, kernel_regularizer=of.OrthogonalRegularizer(0.1), name="c"),
    ]
    model = wrapped(side, tf.keras.Sequential([tf.keras.Input((WIDTH,)), *layers]))
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return told(model, model.fit(*data(), epochs=2, **FIT))


def fit_with_a_frozen_teacher(side: Side) -> Found:
    """``add_loss`` with the results of a model of Keras in the call of the model."""
    teacher = tf.keras.Sequential([tf.keras.Input((WIDTH,)), L.Dense(1, name="wise")])
    teacher.trainable = False

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            h = model.first(x)
        with side.part(1):
            y = model.second(h)
            model.add_loss(tf.reduce_mean(tf.square(y - teacher(x))))
            return y

    model = model_of(side, call, first=dense("first"), second=dense("second", 1, None))
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return told(model, model.fit(*data(), epochs=2, **FIT))


NAMES = names_of(globals(), "fit_own_loss_and_metrics", "told_about")
