"""Numbers of one partition that a script keeps in something, for later steps, see ``tf_beside``.

A generated population: whose number it is x what it is kept in x who reads it x whether it is kept
before the first step that reads it, or after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import rows
from tf_users import dense, model_of


class _Kept:
    """What a number is kept in."""

    def __init__(self) -> None:
        self.variable = tf.Variable(1.0, trainable=False, name="kept")
        self.trained = tf.Variable(1.0, name="kept_and_trained")
        self.row = tf.Variable([1.0, 1.0], trainable=False, name="row")
        self.table = tf.Variable([[1.0], [1.0]], trainable=False, name="table")
        self.tensor = tf.constant(1.0)
        self.rate = tf.keras.optimizers.SGD(1.0)
        self.mean = tf.keras.metrics.Mean()
        self.mean.update_state(1.0)
        self.function = tf.function(self.variable.assign)


def _scattered(kept: _Kept, number: Any) -> None:
    kept.row.scatter_nd_update([[1]], tf.reshape(number, [1]))


#: Each takes what keeps, and a number.
KEEPS: dict[str, Callable[[_Kept, Any], Any]] = {
    "variable": lambda kept, number: kept.variable.assign(number),
    "trained": lambda kept, number: kept.trained.assign(number),
    "added": lambda kept, number: kept.variable.assign_add(number),
    "row": lambda kept, number: kept.row.assign(tf.stack([1.0, number])),
    "part of a row": lambda kept, number: kept.row[1].assign(number),
    "scattered": _scattered,
    "table": lambda kept, number: kept.table.assign([[1.0], [number]]),
    "function": lambda kept, number: kept.function(number),
    "tensor": lambda kept, number: setattr(kept, "tensor", number),
    "rate": lambda kept, number: kept.rate.learning_rate.assign(number),
    "metric": lambda kept, number: kept.mean.update_state(number),
}


def _read(kept: _Kept, keep: str) -> Any:
    """Returns what is kept, as a tensor."""
    kinds = {
        "tensor": lambda: kept.tensor,
        "rate": lambda: tf.convert_to_tensor(kept.rate.learning_rate),
        "metric": lambda: kept.mean.result(),
        "trained": lambda: tf.convert_to_tensor(kept.trained),
        "row": lambda: kept.row[1],
        "part of a row": lambda: tf.reduce_sum(kept.row) - 1.0,
        "scattered": lambda: kept.row[1],
        "table": lambda: tf.nn.embedding_lookup(kept.table, [1])[0, 0],
    }
    return kinds.get(keep, lambda: tf.convert_to_tensor(kept.variable))()


#: Where it is read.
READERS = (
    *("loss", "weight of gradients", "result", "first half", "second half", "argument"),
    *("argument of the model", "function", "constant"),
)
ORIGINS = ("gradient 0", "gradient 1", "weight 0", "weight 1")
ALL = [
    each
    for each in itertools.product(ORIGINS, KEEPS, READERS, ("before", "after"))
    # A tensor that a function takes from around it is the one of its first call.
    if each[1] != "tensor" or each[2] in ("argument", "function")
]


def train(side: Side, origin: str, keep: str, reader: str, when: str) -> Found:
    """Trains for three steps, in which a number of the step before is read."""
    kept = _Kept()

    def call(model: Any, given: Any, training: Any) -> Any:
        x, scale = given if isinstance(given, tuple) else (given, 1.0)
        with side.part(0):
            x = model.first(x) * scale
            if reader == "first half":
                x = x * _read(kept, keep)
        with side.part(1):
            x = model.second(x)
            return x * _read(kept, keep) if reader == "second half" else x

    model = model_of(side, call, first=dense("first"), second=dense("second"))
    optimizer, same = tf.keras.optimizers.SGD(0.1), []

    def compute(x: Any, scale: Any) -> Any:
        with tf.GradientTape() as tape:
            if reader == "argument of the model":
                y = model((x, _read(kept, keep)), training=True)
            else:
                y = model(x, training=True)
            loss = tf.reduce_mean(tf.square(y - 0.3))
            if reader == "loss":
                loss = loss * _read(kept, keep)
            if reader == "argument":
                loss = loss * tf.reduce_mean(scale)
            if reader == "constant":
                loss = loss + _read(kept, keep)
        gradients = tape.gradient(loss, model.trainable_variables)
        if reader == "weight of gradients":
            gradients = [each * _read(kept, keep) for each in gradients]
        return gradients, loss, y + _read(kept, keep) if reader == "result" else y

    step = side.step(compute)
    plainly = side.step(lambda x: model(x))
    if reader != "argument of the model":
        plainly(rows(9))
    else:
        side.step(lambda x: model((x, tf.constant(1.0))))(rows(9))

    @tf.function
    def by_number(x: Any) -> Any:
        return x * _read(kept, keep)

    def number(gradients: Any) -> Any:
        place = 0 if origin.endswith("0") else 2
        variable = model.trainable_variables[place]
        value = gradients[place] if origin.startswith("gradient") else variable
        return 1.0 + tf.norm(tf.convert_to_tensor(value))

    gradients: Any = model.trainable_variables
    for turn in range(3):
        if when == "before" or turn:
            KEEPS[keep](kept, number(gradients))
        found = step(rows(turn), tf.fill([8], _read(kept, keep)))
        gradients = [each.accumulate() for each in found[0]]
        if reader == "function":
            gradients = [by_number(each) for each in gradients]
            same.append(by_number(tf.constant(2.0)))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        same += [found[1].reduce_mean(), found[2].merge()]
    same.append(np.float32(_read(kept, keep)))
    return Found(same, by_name(model.trainable_variables, model.trainable_variables))
