"""Bodies about values of variables: initial, trained in replicas, saved and restored."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows, two_layers

from smdistributed.modelparallel.common.errors import CheckpointError, PartitionError

L = tf.keras.layers
WORDS = 50


def initial(side: Side) -> Found:
    """Initializers that draw from NumPy, Python and TensorFlow, one after the other."""
    generator = np.random.default_rng(0)
    state = tf.random.Generator.from_seed(1)
    kinds = (
        lambda shape, dtype=None: tf.constant(generator.normal(size=shape), dtype),
        lambda shape, dtype=None: generator.normal(size=shape).astype("float32"),
        lambda shape, dtype=None: tf.random.normal(shape) * tf.random.uniform(shape),
        lambda shape, dtype=None: tf.fill(shape, random.random()),
        lambda shape, dtype=None: state.normal(shape),
        "glorot_uniform",
    )

    class Many(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="many")
            self.dense = [
                L.Dense(WIDTH, kernel_initializer=kind, bias_initializer=kind, name=f"dense_{i}")
                for i, kind in enumerate(kinds * 2)
            ]

        def call(self, x: Any) -> Any:
            for number, layer in enumerate(self.dense):
                with side.part(number % 2):
                    x = tf.tanh(layer(x))
            return x

    model = Many()
    output = side.step(lambda x: model(x))(rows()).merge()
    return Found([output], by_name(model.trainable_variables, model.trainable_variables))


def embeddings(side: Side) -> Found:
    """Adam on slices, of which each step has others."""

    class Words(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="words")
            self.table = L.Embedding(WORDS, WIDTH, name="table")
            self.head = L.Dense(WORDS, name="head")

        def call(self, x: Any) -> Any:
            with side.part(0):
                x = self.table(x)
            with side.part(1):
                return self.head(x)

    model, optimizer = Words(), tf.keras.optimizers.Adam(0.1, clipnorm=0.5)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(x, model(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for number in range(4):
        words = tf.constant(np.random.RandomState(number).randint(0, WORDS, (16, 3)))
        gradients, loss = compute(side.share(words))
        means = [side.mean(each.accumulate()) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        losses.append(side.mean(loss.reduce_mean()))
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def _trained(side: Side, optimizer: Any) -> tuple[Any, Any]:
    """Returns a model after a step of training, and the step."""
    model = two_layers(side)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables), loss

    def train() -> Any:
        gradients, loss = compute(rows())
        optimizer.apply_gradients(
            zip([each.accumulate() for each in gradients], model.trainable_variables, strict=True)
        )
        return loss.reduce_mean()

    return model, train


def partial_checkpoints(side: Side, folder: str) -> None:
    """What would write a part of a model is refused."""
    optimizer = tf.keras.optimizers.Adam(0.1)
    model, train = _trained(side, optimizer)
    train()
    where = (
        r"variable \S*(first|second)/kernel\S* lives on rank [01] \(partition [01]\), not in this"
    )
    path = str(Path(folder, "part"))
    for kept in ({"model": model}, {"optimizer": optimizer, "model": model}, {"layers": [model]}):
        with pytest.raises(PartitionError, match=where):
            tf.train.Checkpoint(**kept).save(path)
        with pytest.raises(PartitionError, match=where):
            tf.train.CheckpointManager(tf.train.Checkpoint(**kept), folder, 1).save()
    own = Path(tempfile.mkdtemp(dir=folder))
    with pytest.raises(PartitionError, match=where):
        model.save_weights(str(own / "a.weights.h5"))
    with pytest.raises(PartitionError):
        tf.train.Checkpoint(optimizer=optimizer).save(path)
    assert not list(Path(folder).glob("part*"))


def write_plainly(side: Side, path: str) -> Found:
    """Trains and writes a checkpoint of TensorFlow; returns the next losses."""
    model, train = _trained(side, tf.keras.optimizers.SGD(0.1))
    train()
    tf.train.Checkpoint(model=model).write(path)
    return Found([train() for _ in range(2)], {})


def read_plainly(side: Side, path: str) -> Found:
    """Reads it after a first step; returns the next losses."""
    model, train = _trained(side, tf.keras.optimizers.SGD(0.1))
    train()
    tf.train.Checkpoint(model=model).read(path)
    return Found([train() for _ in range(2)], {})


_OPTIMIZERS = {
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "rmsprop": lambda: tf.keras.optimizers.RMSprop(0.1),
}


def other_optimizers(side: Side, folder: str) -> None:
    """A checkpoint does not go into an optimizer of another kind, before a step or after."""
    import smdistributed.modelparallel.tensorflow as smp

    def manager(name: str, kind: str) -> tuple[Any, Any]:
        optimizer = _OPTIMIZERS[kind]()
        model, train = _trained(side, optimizer)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        return smp.CheckpointManager(checkpoint, str(Path(folder, name))), train

    for saved, others in (("adam", ("sgd", "momentum", "rmsprop")), ("sgd", ("adam",))):
        writer, train = manager(saved, saved)
        train()
        writer.save()
        for other in others:
            reader, train = manager(saved, other)
            train()
            with pytest.raises(CheckpointError, match="restore it into the model and optimizer"):
                reader.restore()
        reader, train = manager(saved, saved)
        reader.restore()  # before its first step, though another model is partitioned
        train()
        model, _ = _trained(side, None)
        alone = smp.CheckpointManager(tf.train.Checkpoint(model=model), str(Path(folder, saved)))
        alone.restore()
        side.step(lambda x, model=model: model(x))(rows())
