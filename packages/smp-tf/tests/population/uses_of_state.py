"""Models that keep something between calls, in Python or in variables, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import dense, model_of, train

L = tf.keras.layers


def _sequences() -> Any:
    return tf.constant(np.random.RandomState(0).standard_normal((8, 5, WIDTH)), tf.float32)


def _in_two(side: Side, between: Any, after: Any = lambda model, x: x, **layers: Any) -> Any:
    """Returns a model of two dense layers, with something behind each."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = between(model, model.first(x))
        with side.part(1):
            return after(model, model.second(x))

    return model_of(side, call, first=dense("first"), second=dense("second"), **layers)


class _Weight(L.Layer):  # type: ignore[misc]
    """A layer with one number that is not trained, and what it does with it."""

    def __init__(self, name: str, what: Any) -> None:
        super().__init__(name=name)
        self.what = what

    def build(self, shape: Any) -> None:
        self.value = self.add_weight(name="value", shape=(), initializer="zeros", trainable=False)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.what(self.value, x)


def _weight(name: str, what: Any) -> Any:
    return lambda: _Weight(name, what)


def counter_outside(side: Side) -> Found:
    """The call counts in a variable that is not the model's, and uses the count."""
    counter = tf.Variable(0.0, trainable=False)

    def between(model: Any, x: Any) -> Any:
        counter.assign_add(1.0)
        return x / counter

    return train(side, _in_two(side, between), rows())


def attribute_between_steps(side: Side) -> Found:
    """An attribute changes between calls of one step function, which TensorFlow does not see."""
    model = _in_two(side, lambda model, x: x * model.factor)
    model.factor = 1.0

    def after() -> None:
        model.factor += 1.0

    return train(side, model, rows(), after=after)


def tensor_of_a_closure(side: Side) -> Found:
    """Both halves read a tensor that was computed outside, eagerly."""
    table = tf.constant(np.random.RandomState(1).standard_normal((WIDTH,)), tf.float32)
    return train(side, _in_two(side, lambda _, x: x * table, lambda _, x: x + table), rows())


def array_of_a_closure(side: Side) -> Found:
    """Both halves read an array of NumPy that changes after the first call."""
    table = np.ones((WIDTH,), np.float32)

    def after() -> None:
        table[:] *= 2.0

    model = _in_two(side, lambda _, x: x * table, lambda _, x: x + table)
    return train(side, model, rows(), after=after)


def tensors_on_the_model(side: Side) -> Found:
    """The first half leaves tensors in attributes and in a list, and the second takes them."""

    def between(model: Any, x: Any) -> Any:
        model.kept = [x, x * 2.0]
        model.skip = tf.tanh(x)
        return x

    def after(model: Any, x: Any) -> Any:
        return x + model.skip + tf.add_n(list(model.kept))

    class Plain:
        """Attributes of it are nobody's."""

    box = Plain()
    model = _in_two(side, lambda _, x: between(box, x), lambda _, x: after(box, x))
    return train(side, model, rows())


def list_of_states(side: Side) -> Found:
    """A Python loop over time appends states to a list, which is stacked on the other half."""

    def call(model: Any, x: Any, training: Any) -> Any:
        states, state = [], tf.zeros_like(x[:, 0])
        with side.part(0):
            for each in tf.unstack(x, axis=1):
                state = model.cell(tf.concat([each, state], -1))
                states.append(state)
        with side.part(1):
            return model.head(tf.stack(states, 1)) + tf.reduce_mean(states, 0)[:, tf.newaxis]

    return train(side, model_of(side, call, cell=dense("cell"), head=dense("head")), _sequences())


def tensor_array(side: Side) -> Found:
    """A ``TensorArray`` written in a loop on one half, and read in a loop on the other."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.first(x)
            written = tf.TensorArray(tf.float32, 5, element_shape=(None, WIDTH))
            _, written = tf.while_loop(
                lambda n, _: n < 5,
                lambda n, kept: (n + 1, kept.write(n, tf.cast(n, tf.float32) * x[:, n])),
                (0, written),
            )
        with side.part(1):
            total = tf.while_loop(
                lambda n, _: n < 5,
                lambda n, total: (n + 1, total + written.read(n)),
                (0, tf.zeros_like(x[:, 0])),
            )[1]
            return model.second(total)

    model = model_of(side, call, first=dense("first"), second=dense("second"))
    return train(side, model, _sequences())


def running_mean(side: Side) -> Found:
    """A moving average of activations on each half, which the next microbatch subtracts."""

    def follow(value: Any, x: Any) -> Any:
        y = x - value
        value.assign(0.9 * value + 0.1 * tf.reduce_mean(x))
        return y

    model = _in_two(
        side,
        lambda model, x: model.one(x),
        lambda model, x: model.other(x),
        one=_weight("one", follow),
        other=_weight("other", follow),
    )
    found = train(side, model, rows())
    return Found(found.same, found.own | by_name(model.variables, model.variables))


def warm_up(side: Side) -> Found:
    """A branch on a count of calls: other operations in the first ones."""

    def what(value: Any, x: Any) -> Any:
        value.assign_add(1.0)
        return tf.cond(value > 6.0, lambda: tf.sin(x), lambda: x * 0.5)

    model = _in_two(side, lambda model, x: model.warm(x), warm=_weight("warm", what))
    return train(side, model, rows())


def queue_of_keys(side: Side) -> Found:
    """A buffer of features of earlier microbatches, which later ones are compared with."""

    class Queue(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.keys = self.add_weight(
                name="keys", shape=(6, WIDTH), initializer="ones", trainable=False
            )
            self.built = True

        def call(self, x: Any) -> Any:
            keys = tf.convert_to_tensor(self.keys)
            self.keys.assign(tf.concat([tf.stop_gradient(x), keys[: 6 - x.shape[0]]], 0))
            return tf.matmul(x, keys, transpose_b=True)

    model = _in_two(
        side, lambda _, x: x, lambda model, x: model.queue(x), queue=lambda: Queue(name="queue")
    )
    found = train(side, model, rows())
    return Found(found.same, found.own | by_name(model.variables, model.variables))


def codebook(side: Side) -> Found:
    """Vector quantisation: a straight-through estimate, and codes that follow what they got."""

    class Codes(L.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            start = tf.keras.initializers.RandomUniform(-1.0, 1.0, seed=3)
            self.codes = self.add_weight(
                name="codes", shape=(5, WIDTH), initializer=start, trainable=False
            )
            self.built = True

        def call(self, x: Any) -> Any:
            codes = tf.convert_to_tensor(self.codes)
            far = tf.reduce_sum(tf.square(x[:, tf.newaxis] - codes), -1)
            taken = tf.one_hot(tf.argmin(far, -1), 5)
            y = taken @ codes
            count = tf.reduce_sum(taken, 0)[:, tf.newaxis]
            self.codes.assign(
                tf.where(
                    count > 0,
                    0.9 * codes
                    + 0.1 * tf.math.divide_no_nan(tf.matmul(taken, x, transpose_a=True), count),
                    codes,
                )
            )
            self.add_loss(0.25 * tf.reduce_mean(tf.square(tf.stop_gradient(y) - x)))
            return x + tf.stop_gradient(y - x)

    model = _in_two(side, lambda model, x: model.codes(x), codes=lambda: Codes(name="codes"))
    found = train(side, model, rows())
    return Found(found.same, found.own | by_name(model.variables, model.variables))


def metric_of_the_model(side: Side) -> Found:
    """Layers that update metrics of their own in their call."""

    class Measured(L.Layer):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.mean = tf.keras.metrics.Mean(name="seen")

        def call(self, x: Any) -> Any:
            self.mean.update_state(x)
            return x

    model = _in_two(
        side,
        lambda model, x: model.one(x),
        lambda model, x: model.other(x),
        one=lambda: Measured("one"),
        other=lambda: Measured("other"),
    )
    found = train(side, model, rows())
    return Found(found.same, found.own | by_name(model.variables, model.variables))


def states_reset(side: Side) -> Found:
    """A stateful recurrence that is set back between epochs."""

    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.cell(x)
        with side.part(1):
            return model.head(x)

    cell = L.GRU(WIDTH, stateful=True, name="cell")
    model = model_of(side, call, cell=lambda: cell, head=dense("head"))
    return train(
        side, model, _sequences(), after=getattr(cell, "reset_state", None) or cell.reset_states
    )


def table_that_grows(side: Side) -> Found:
    """A table that the call writes and reads."""
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def between(_: Any, x: Any) -> Any:
        keys = tf.argmax(x, -1)
        before = tf.ensure_shape(table.lookup(keys), keys.shape)
        with tf.control_dependencies([before]):
            write = table.insert(keys, tf.reduce_sum(x, -1))
        with tf.control_dependencies([write]):
            return x + before[:, tf.newaxis]

    return train(side, _in_two(side, between), rows())


def generator_of_the_model(side: Side) -> Found:
    """Noise from a ``tf.random.Generator`` in the call, whose state each microbatch advances."""
    generator = tf.random.Generator.from_seed(7)

    def between(_: Any, x: Any) -> Any:
        return x + 0.1 * generator.normal(tf.shape(x))

    return train(side, _in_two(side, between), rows())


def noise_by_seeds(side: Side) -> Found:
    """Stateless noise, with a count of calls as its seed."""

    def what(value: Any, x: Any) -> Any:
        value.assign_add(1.0)
        seed = tf.stack([tf.cast(value, tf.int32), 5])
        return x * tf.cast(tf.random.stateless_uniform(tf.shape(x), seed) > 0.3, x.dtype)

    model = _in_two(
        side,
        lambda model, x: model.one(x),
        lambda model, x: model.other(x),
        one=_weight("one", what),
        other=_weight("other", what),
    )
    return train(side, model, rows())


#: What gives the numbers of TensorFlow.
NAMES = (
    "counter_outside",
    "attribute_between_steps",
    "tensor_of_a_closure",
    "array_of_a_closure",
    "tensors_on_the_model",
    "list_of_states",
    "tensor_array",
    "running_mean",
    "warm_up",
    "queue_of_keys",
    "codebook",
    "metric_of_the_model",
    "states_reset",
    "table_that_grows",
    "generator_of_the_model",
    "noise_by_seeds",
)
