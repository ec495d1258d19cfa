"""What bodies do that save, restore, export, and train with Keras's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tf_models import PROBLEMS
from tf_training import no_partition

STEPS = 3


def trainer(name: str) -> tuple[Any, Any, Any]:
    """Returns a model, its optimizer, and a function that trains one step in a tf.function."""
    import smdistributed.modelparallel.tensorflow as smp

    part = smp.partition if smp.pp_size() > 1 else no_partition
    problem = PROBLEMS[name](smp.DistributedModel, part)
    model, optimizer = problem.model, tf.keras.optimizers.Adam(0.01)
    x, y = tf.nest.map_structure(tf.constant, problem.batch)

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    def train() -> Any:
        gradients, loss = compute(x, y)
        gradients = [smp.allreduce(each.accumulate()) for each in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return smp.allreduce(loss.reduce_mean())

    return model, optimizer, tf.function(train)


def train_and_save(name: str, directory: str) -> list[float]:
    """Trains, saves, and trains on; returns the losses after the save."""
    import smdistributed.modelparallel.tensorflow as smp

    model, optimizer, train = trainer(name)
    count = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, count=count)
    manager = smp.CheckpointManager(checkpoint, directory, max_to_keep=2)
    for _ in range(STEPS):
        train()
        count.assign_add(1)
        path = manager.save()
    assert path == str(Path(directory, "ckpt-3"))
    assert manager.latest_checkpoint == path
    assert [Path(each).name for each in manager.checkpoints] == ["ckpt-2", "ckpt-3"]
    text = Path(directory, "checkpoint").read_text()
    assert 'model_checkpoint_path: "ckpt-3"' in text, text
    return [float(train()) for _ in range(STEPS)]


def restore_and_train(name: str, directory: str, when: str) -> list[float]:
    """Restores; returns the losses of the steps after it."""
    import smdistributed.modelparallel.tensorflow as smp

    model, optimizer, train = trainer(name)
    count = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, count=count)
    manager = smp.CheckpointManager(checkpoint, directory)
    order: list[str] = []
    if when == "before":
        assert manager.restore() == str(Path(directory, "ckpt-3"))
        assert (int(count), int(optimizer.iterations)) == (STEPS, STEPS)
        count.assign_add(1)  # as a script does that begins its next epoch
        smp.register_post_partition_hook(lambda: order.append("hook"))
    elif when == "in a hook":
        smp.register_post_partition_hook(manager.restore)
    else:
        train()
        manager.restore()
    losses = [float(train()) for _ in range(STEPS)]
    assert int(count) == STEPS + (when == "before")
    assert order == (["hook"] if when == "before" else [])
    return losses


def keep_and_restore(directory: str) -> None:
    """Saves and restores averages of weights, of which each process has had its own."""
    import smdistributed.modelparallel.tensorflow as smp

    model, _, train = trainer("cnn")
    train()
    averages = [tf.Variable(0.5 * each, trainable=False) for each in model.trainable_variables]
    wanted = [each.numpy() for each in averages]
    checkpoint = tf.train.Checkpoint(model=model, averages=averages)
    manager = smp.CheckpointManager(checkpoint, directory)
    manager.save()
    for each in averages:
        each.assign(tf.zeros_like(each))
    manager.restore()
    for each, value in zip(averages, wanted, strict=True):
        np.testing.assert_array_equal(each.numpy(), value)


def export(name: str, folder: str) -> Any:
    """Trains, saves the whole model, and returns what the model computes."""
    import smdistributed.modelparallel.tensorflow as smp

    problem = PROBLEMS[name](smp.DistributedModel, smp.partition)
    model, optimizer = problem.model, tf.keras.optimizers.SGD(0.1)
    x, y = tf.nest.map_structure(tf.constant, problem.batch)

    @smp.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    @smp.step
    def predict(x: Any) -> Any:
        return model(x, training=False)

    gradients = [each.accumulate() for each in compute(x, y)]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    before = predict(x).merge().numpy()
    model.save_model(folder)
    np.testing.assert_array_equal(predict(x).merge().numpy(), before)
    return before


def load(name: str, folder: str) -> Any:
    """Loads an exported model with TensorFlow alone; returns what it computes."""
    problem = PROBLEMS[name](tf.keras.Model, None)
    loaded = tf.saved_model.load(folder)
    features = tf.constant(problem.batch[0])
    outputs = loaded.serve(features).numpy()
    (served,) = loaded.signatures["serving_default"](input_0=features).values()
    np.testing.assert_array_equal(served.numpy(), outputs)
    return outputs


def export_named(folder: str) -> None:
    """Saves a model of inputs by name, and loads it; its signature has these names."""
    import smdistributed.modelparallel.tensorflow as smp

    class Named(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="named")
            self.first, self.second = (tf.keras.layers.Dense(4) for _ in range(2))

        def call(self, inputs: Any, bias: Any) -> Any:
            with smp.partition(0):
                x = self.first(inputs["left"]) + self.first(inputs["right"])
            with smp.partition(1):
                return {"sum": self.second(x) + bias}

    model, rows = Named(), tf.reshape(tf.range(32.0), [8, 4])
    given = {"left": rows, "right": rows * 2.0}
    step = smp.step(lambda given, bias: model(given, bias=bias))
    expected = step(given, tf.ones([8, 4]))["sum"].merge()
    model.save_model(folder)
    served = tf.saved_model.load(folder).signatures["serving_default"]
    found = served(**given, bias=tf.ones([8, 4]))
    np.testing.assert_allclose(found["sum"], expected, rtol=1e-5)
