"""Bodies with state: what a microbatch leaves, the next one finds, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows, two_layers

L = tf.keras.layers


def _train(side: Side, model: Any, batch: Any, extra: Any = lambda loss: None) -> Found:
    """Trains a model for two steps; returns losses, and all its variables."""
    optimizer = tf.keras.optimizers.SGD(0.1)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        extra(loss)
        return gradients, loss

    losses = []
    for _ in range(2):
        gradients, loss = compute(batch)
        means = [None if each is None else each.accumulate() for each in gradients]
        pairs = zip(means, model.trainable_variables, strict=True)
        optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
        losses.append(loss.reduce_mean())
    # Seeds of Keras 3 are numbers of its own.
    variables = [v for v in model.variables if v.dtype in ("float32", tf.float32)]
    return Found(losses, by_name(variables, variables))


def loops(side: Side) -> Found:
    """Loops in both directions, on both halves; those of one read their variables on both ends."""

    class Loops(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="loops")
            self.both = L.Bidirectional(L.SimpleRNN(4, return_sequences=True), name="both")
            self.one = L.SimpleRNN(8, return_sequences=True, go_backwards=True, name="one")
            self.head = L.Dense(3, name="head")

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                y = self.both(x)
            with side.part(1):
                z = self.one(y)
            with side.part(0):
                return self.head(self.both(z)) + tf.reduce_mean(y)

    batch = np.random.RandomState(0).standard_normal((8, 5, 8)).astype("float32")
    return _train(side, Loops(), tf.constant(batch))


def repeated_norm(side: Side) -> Found:
    """A normalisation that both ends of the pipeline update."""

    class Norms(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="norms")
            self.norm = L.BatchNormalization(momentum=0.5, name="norm")
            self.dense = [L.Dense(WIDTH, "tanh", name=f"dense_{place}") for place in range(2)]

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                x = self.norm(self.dense[0](x), training=training)
            with side.part(1):
                x = self.dense[1](x)
            with side.part(0):
                return self.norm(x + 1.0, training=training)

    return _train(side, Norms(), rows())


class Memory(L.Layer):  # type: ignore[misc]
    """Adds what it saw before, and remembers what it is told."""

    def build(self, input_shape: Any) -> None:
        self.seen = self.add_weight(
            name="seen", shape=(WIDTH,), initializer="zeros", trainable=False
        )
        self.built = True

    def call(self, x: Any) -> Any:
        return x + self.seen

    def tell(self, x: Any) -> None:
        self.seen.assign(0.5 * self.seen + tf.reduce_mean(x, axis=0))


def read_then_written(side: Side) -> Found:
    """State that a microbatch reads at one end and writes at the other."""

    class Remembering(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="remembering")
            self.memory = Memory(name="memory")
            self.dense = [L.Dense(WIDTH, "tanh", name=f"dense_{place}") for place in range(2)]

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                x = self.memory(self.dense[0](x))
            with side.part(1):
                x = self.dense[1](x)
            with side.part(0):
                self.memory.tell(x)
                return x * 1.0

    return _train(side, Remembering(), rows())


def written_in_the_body(side: Side) -> Found:
    """A variable that the model reads and the body of the step updates, and one of the body."""
    scale, count = tf.Variable(1.0, trainable=False), tf.Variable(0.0)

    class Scaled(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="scaled")
            self.dense = [L.Dense(WIDTH, "tanh", name=f"dense_{place}") for place in range(2)]

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(0):
                x = self.dense[0](x) * scale
            with side.part(1):
                return self.dense[1](x) * scale

    def update(loss: Any) -> None:
        # Nothing of the model is in the new value: only an order makes its call find the old one.
        scale.assign(scale * 0.9 + 0.3)
        count.assign_add(loss)

    found = _train(side, Scaled(), rows(), update)
    return Found([*found.same, scale, count], found.own)


def updated_in_the_body(side: Side) -> Found:
    """A variable that the model reads on both ends, updated by its gradient in each microbatch."""
    scale = tf.Variable(1.0)
    model = two_layers(side, lambda model, x, given: x * scale, lambda model, x, given: x * scale)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        scale.assign_sub(0.1 * tape.gradient(loss, scale))
        return loss

    return Found([compute(rows()).stack(), compute(rows()).stack(), scale], {})


def without_variables(side: Side) -> Found:
    """Passes without variables, and operations with effects between them."""
    count = tf.Variable(0.0)

    class Bare(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="bare")
            self.dense = L.Dense(WIDTH, "tanh", name="dense")

        def call(self, x: Any, training: Any = None) -> Any:
            with side.part(1):
                y = tf.sin(x) * 2.0
            with side.part(0):
                z = self.dense(y)
            with side.part(1):
                return tf.tanh(z) * y

    def update(loss: Any) -> None:
        tf.debugging.assert_greater(loss, -1.0)
        count.assign_add(loss)

    found = _train(side, Bare(), rows(), update)
    return Found([*found.same, count], found.own)
