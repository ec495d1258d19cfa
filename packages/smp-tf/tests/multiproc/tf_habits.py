"""What scripts of habits are written with, see ``tf_beside`` for what a body is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH
from tf_users import IS_KERAS_3, dense, model_of

CLASSES = 3
TIMES = 5


def names_of(module: dict[str, Any], *of_keras_3: str) -> tuple[str, ...]:
    """Returns the names of a module's own public functions, each of which is a script.

    Args:
        module: its names and what they stand for.
        of_keras_3: those that Keras 2 takes otherwise: its optimizers, ``compute_loss`` and models
            without a batch, and dropout, which it draws from TensorFlow's generator.
    """
    own = (name for name, each in module.items() if isinstance(each, Callable))
    found = (name for name in own if module[name].__module__ == module["__name__"])
    missing = () if IS_KERAS_3 else of_keras_3
    return tuple(name for name in found if not name.startswith("_") and name not in missing)


def labels(seed: int = 0, most: int = CLASSES, *shape: int) -> Any:
    """Returns integers of a batch."""
    return tf.constant(np.random.RandomState(50 + seed).randint(0, most, (8, *shape)))


def numbers(seed: int, *shape: int) -> Any:
    """Returns a batch of numbers."""
    return tf.constant(np.random.RandomState(seed).standard_normal((8, *shape)), tf.float32)


def wrapped(side: Side, model: Any) -> Any:
    """Returns a model of Keras as one of a side."""
    return model if side.base is tf.keras.Model else side.base(model)


def square(model: Any, x: Any) -> Any:
    """Returns a loss."""
    return tf.reduce_mean(tf.square(model(x, training=True) - 0.3))


def entropy(y: Any, logits: Any) -> Any:
    """Returns a loss of classes."""
    of_each = tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return tf.reduce_mean(of_each)


def classify(model: Any, x: Any, y: Any) -> Any:
    """Returns the loss of a classifier."""
    return entropy(y, model(x, training=True))


def computing(side: Side, model: Any, loss_of: Any = square) -> Any:
    """Returns a step that computes gradients by all that trains, and a loss."""

    @side.step
    def compute(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, *given)
        return tape.gradient(loss, model.trainable_variables), loss

    return compute


def means(gradients: Iterable[Any]) -> list[Any]:
    """Returns what a step gave, of all its microbatches."""
    return [None if each is None else each.accumulate() for each in gradients]


def update(optimizer: Any, gradients: Iterable[Any], variables: Iterable[Any]) -> None:
    """Updates by gradients that are there."""
    pairs = zip(gradients, variables, strict=True)
    optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])


def ended(same: list[Any], *models: Any) -> Found:
    """Returns numbers that all ranks have, and all variables of models."""
    own: dict[str, Any] = {}
    for place, model in enumerate(models):
        found = by_name(model.variables, model.variables)
        own |= {f"{place} {name}": value for name, value in found.items()}
    return Found(same, own)


def loop(
    side: Side, model: Any, loss_of: Any, batches: Iterable[Any], optimizer: Any = None
) -> Found:
    """Trains on each of some batches."""
    optimizer, same = optimizer or tf.keras.optimizers.SGD(0.1), []
    compute = computing(side, model, loss_of)
    for batch in batches:
        gradients, loss = compute(*batch)
        update(optimizer, means(gradients), model.trainable_variables)
        same.append(loss.reduce_mean())
    return ended(same, model)


FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def data(width: int = 1, count: int = 24) -> tuple[Any, Any]:
    """Returns rows and targets as arrays."""
    x = np.random.RandomState(0).standard_normal((count, WIDTH)).astype("float32")
    return x, (x[:, :width] > 0).astype("float32")


def told(model: Any, history: Any, *more: Any) -> Found:
    """Returns what ``fit`` tells, further numbers, and all variables."""
    same: list[Any] = []
    for key in sorted(history.history):
        same += [key, np.array(history.history[key], np.float32)]
    return ended([*same, *more], model)


def halves(side: Side, name: str, width: int = WIDTH, activation: Any = None) -> Any:
    """Returns a model of a layer on each half, with names of its own."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
        with side.part(1):
            return model.second(x)

    first, second = dense(f"{name}_first"), dense(f"{name}_second", width, activation)
    return model_of(side, call, first=first, second=second)


def words(seed: int = 0, most: int = 7) -> Any:
    """Returns tokens, zeros at the ends of some rows."""
    found = np.random.RandomState(seed).randint(1, most, (8, TIMES))
    found[::2, TIMES - 2 :] = 0
    return tf.constant(found)


def batches(*makes: Any, count: int = 3) -> list[Any]:
    """Returns batches of what functions make of their numbers."""
    return [tuple(make(number) for make in makes) for number in range(count)]
