"""Bodies that train with Keras's own loop, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_users import dense, model_of

L = tf.keras.layers
ROWS = 32


def _data(seed: int = 0) -> tuple[Any, Any]:
    x = np.random.RandomState(seed).standard_normal((ROWS, 6)).astype("float32")
    return x, x[:, :3].argmax(axis=1)


def _found(model: Any, *histories: Any) -> Found:
    same = [
        np.array(history.history[key], np.float32)
        for history in histories
        for key in sorted(history.history)
    ]
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))


def _on_a_base(side: Side) -> Any:
    """Returns a classifier on a base that is built and frozen."""
    base = tf.keras.Sequential(
        [L.Dense(8, "tanh", name=f"base_{place}") for place in range(2)], name="base"
    )
    base.build((None, 6))
    base.trainable = False

    class OnBase(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="on_base")
            self.base, self.head = base, L.Dense(3, name="head")

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                x = self.base(x, training=training)
            with side.part(1):
                return self.head(x)

    return OnBase()


def _compile(model: Any, optimizer: Any = None, **options: Any) -> None:
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or tf.keras.optimizers.Adam(0.05), loss, **options)


def transfer(side: Side) -> Found:
    """A frozen base, then a frozen head instead."""
    model = _on_a_base(side)
    histories = []
    for of_base, of_head in ((False, True), (True, False)):
        model.base.trainable, model.head.trainable = of_base, of_head
        _compile(model, metrics=["accuracy"])
        histories.append(model.fit(*_data(), batch_size=16, epochs=2, shuffle=False, verbose=0))
    model.head.trainable = True
    whole = model.get_weights()
    model.set_weights([0.5 * each for each in whole])
    found = _found(model, *histories)
    return found._replace(same=[*found.same, *whole, *model.get_weights()])


def options(side: Side) -> Found:
    """Class weights, validation, callbacks, averages, and a dataset with weights of examples."""
    model = _on_a_base(side)
    model.base.trainable = True
    averaging = tf.keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)
    _compile(model, averaging, weighted_metrics=["accuracy"])
    x, y = _data()
    seen: list[float] = []
    callbacks = [
        tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch)),
        tf.keras.callbacks.EarlyStopping(
            "val_loss", patience=1, min_delta=10.0, restore_best_weights=True
        ),
        tf.keras.callbacks.LambdaCallback(on_batch_end=lambda _, logs: seen.append(logs["loss"])),
    ]
    weights = {0: 1.0, 1: 3.0, 2: 0.5}
    first = model.fit(
        x,
        y,
        epochs=5,
        class_weight=weights,
        validation_data=_data(1),
        callbacks=callbacks,
        batch_size=16,
        shuffle=False,
        verbose=0,
    )
    weighted = (x, y, np.linspace(0.0, 2.0, ROWS, dtype="float32"))
    second = model.fit(tf.data.Dataset.from_tensor_slices(weighted).batch(16), verbose=0)
    found = _found(model, first, second)
    return found._replace(same=[*found.same, np.array(seen, np.float32)])


def masked(side: Side) -> Found:
    """A loss over times of which microbatches have other numbers, with weights of times."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.table(x)
        with side.part(1):
            return model.head(x)

    model = model_of(
        side,
        call,
        table=lambda: L.Embedding(5, 4, mask_zero=True, name="table"),
        head=dense("head", 1),
    )
    x = np.random.RandomState(0).randint(1, 5, (ROWS, 6))
    x[np.arange(6) >= np.random.RandomState(1).randint(1, 7, (ROWS, 1))] = 0
    y = np.random.RandomState(2).standard_normal((ROWS, 6, 1)).astype("float32")
    weights = np.linspace(0.5, 2.0, 6 * ROWS, dtype="float32").reshape(ROWS, 6)
    x, y, weights = (_share_of_batches(side, each) for each in (x, y, weights))
    options = {"batch_size": len(x) // 2, "sample_weight": weights, "verbose": 0}
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    found = _found(model, model.fit(x, y, epochs=2, shuffle=False, **options))
    return found._replace(same=[*found.same, model.evaluate(x, y, **options)])


def masked_in_replicas(side: Side) -> Found:
    """The same in replicas, whose losses are of their own examples."""
    return masked(side)._replace(same=[])


def _share_of_batches(side: Side, array: Any) -> Any:
    """Returns the part of two batches that is this replica's, of each batch."""
    batches = array.reshape(2, ROWS // 2, *array.shape[1:]).swapaxes(0, 1)
    return np.array(side.share(batches)).swapaxes(0, 1).reshape(-1, *array.shape[1:])


def outputs(side: Side) -> Found:
    """Inputs and outputs by name, losses of two of these, a penalty, and a short last batch."""

    class Named(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="named")
            self.body = L.Dense(8, "tanh", name="body")
            penalty = tf.keras.regularizers.L2(0.01)
            self.heads = {
                name: L.Dense(2, kernel_regularizer=penalty, name=name) for name in ("c", "a", "b")
            }

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                body = self.body(x["left"] + x["right"])
                a = self.heads["a"](body)
            with side.part(1):
                return {"a": a, "b": self.heads["b"](body), "c": self.heads["c"](body)}

    model = Named()
    x, _ = _data()
    targets = {"a": x[:, :2], "b": x[:, 2:4]}
    model.compile(
        tf.keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5),
        loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 2.0, "b": 0.5},
    )
    given, options = {"left": x, "right": 2.0 * x}, {"batch_size": 12, "verbose": 0}
    found = _found(model, model.fit(given, targets, epochs=2, shuffle=False, **options))
    # Of one size of batches: another graph takes a second.
    of_one_size = {name: each[:24] for name, each in given.items()}
    wanted = {name: each[:24] for name, each in targets.items()}
    scores = model.evaluate(of_one_size, wanted, return_dict=True, **options)
    return found._replace(
        same=[
            *found.same,
            *(np.float32(scores[name]) for name in sorted(scores)),
            model.predict(of_one_size, **options),
        ]
    )
