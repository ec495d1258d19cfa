"""Bodies about values of variables: initial, saved and restored."""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows, two_layers

from smdistributed.modelparallel.common.errors import (
    CheckpointError,
    PartitionError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.keras import build_optimizer, variable_of
from smdistributed.modelparallel.tensorflow.parameters.variables import home_of

L = tf.keras.layers


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
        "zeros",  # the seventh, so that each kind is on both halves
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
    with pytest.raises(UnsupportedError, match="use save_weights and"):
        model.save(str(Path(folder, "part.keras")))
    with pytest.raises(PartitionError):
        tf.train.Checkpoint(optimizer=optimizer).save(path)
    assert not list(Path(folder).glob("part*"))


def write_weights(side: Side, folder: str) -> Found:
    """Weights are written by a callback of ``fit``, and read by the same model."""
    model = _sequential(side)
    path = str(Path(folder, f"{side.base.__name__}.weights.h5"))
    kept = [tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True)]
    if keras.IS_KERAS_3:
        whole = str(Path(folder, f"{side.base.__name__}.keras"))
        kept.append(tf.keras.callbacks.ModelCheckpoint(whole))
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(rows(), rows(1), callbacks=kept, epochs=2, **options)
    found = [model.predict(rows(), verbose=0)]
    with tempfile.TemporaryDirectory() as own:  # each process makes another one
        mine = str(Path(own, "mine.weights.h5"))
        for written in (path, mine):
            model.fit(rows(), rows(1), **options)
            model.load_weights(written)
            found.append(model.predict(rows(), verbose=0))
            model.save_weights(mine)
    last = model.get_layer(model.layers[-1].name)  # of the model that was given
    return Found([*found, np.float32(len(model.layers)), np.array(last.trainable)], {})


def read_weights(side: Side, folder: str) -> Found:
    """Another model reads what was written with the library and without, once it has weights."""
    model, found = _sequential(side), []
    if side.base is not tf.keras.Model:
        model.predict(rows(), verbose=0)
        with pytest.raises(CheckpointError, match="could not be read: FileNotFoundError"):
            model.load_weights(str(Path(folder, "missing.weights.h5")))
    for path in sorted(Path(folder).glob("*.weights.h5")):
        model.predict(rows(), verbose=0)
        model.load_weights(str(path))
        found.append(model.predict(rows(), verbose=0))
    return Found(found, {})


def read_models(folder: str) -> list[Any]:
    """Keras alone reads whole models, and trains them on; returns what each is and does then."""
    found: list[Any] = []
    for path in sorted(Path(folder).glob("*.keras")):
        model = tf.keras.models.load_model(path)
        results = [type(model).__name__, int(model.optimizer.iterations)]
        results.append(model.predict(rows(), verbose=0))
        model.fit(rows(), rows(1), batch_size=8, shuffle=False, verbose=0)
        found.append([*results, model.predict(rows(), verbose=0)])
    return found


def _sequential(side: Side) -> Any:
    # Not by the statistics of batches, which are of microbatches.
    layers = [L.Dense(WIDTH, "tanh"), L.BatchNormalization(trainable=False), L.Dense(WIDTH)]
    model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *layers])
    model = model if side.base is tf.keras.Model else side.base(model)
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    return model


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
    if side.base is not tf.keras.Model:
        # What lives elsewhere takes no memory here.
        for variable in map(variable_of, model._smp_engine.everywhere()[1]):
            has_value = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
            assert bool(has_value) is home_of(variable).is_here
    return Found([train() for _ in range(2)], {})


def backed_up(side: Side, folder: str, freq: Any) -> Found:
    """A training of ``fit`` is cut off in its third epoch, and another one goes on with it."""

    class Cut(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.num_batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_batches += 1
            if self.num_batches == 10:
                raise KeyboardInterrupt

    place = Path(folder, side.base.__name__)
    others = _rank(side) > 0  # whose folder does not count
    options = {"batch_size": 2, "epochs": 4, "shuffle": False, "verbose": 0}
    found: list[Any] = []
    for cut in ([Cut()], []):
        model = two_layers(side)
        if side.base is tf.keras.Model:
            model(rows())  # which Keras wants built
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        given = tempfile.mkdtemp(dir=folder) if others else str(place)
        backup = tf.keras.callbacks.BackupAndRestore(given, save_freq=freq)
        with contextlib.suppress(KeyboardInterrupt):
            history = model.fit(rows(), rows(1), callbacks=[backup, *cut], **options)
            found += [np.float32(history.history["loss"]), np.array(history.epoch)]
        assert any(place.glob("*")) is bool(cut)
    if side.base is not tf.keras.Model:
        _refuse_one_of_keras(model, Path(folder, "of_keras"))
    return Found([*found, model.predict(rows(), verbose=0)], {})


def _rank(side: Side) -> int:
    if side.base is tf.keras.Model:
        return 0
    import smdistributed.modelparallel.tensorflow as smp

    return int(smp.rank())


def _refuse_one_of_keras(model: Any, place: Path) -> None:
    place.mkdir(exist_ok=True)
    Path(place, "latest.weights.h5").touch()
    backup = tf.keras.callbacks.BackupAndRestore(str(place))
    with pytest.raises(CheckpointError, match="that was written without the library"):
        model.fit(rows(), rows(1), callbacks=[backup], verbose=0)


_OPTIMIZERS = {
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "rmsprop": lambda: tf.keras.optimizers.RMSprop(0.1),
}


def other_optimizers(side: Side, folder: str) -> None:
    """A checkpoint does not go into an optimizer of another kind."""
    import smdistributed.modelparallel.tensorflow as smp

    model, train = _trained(side, _OPTIMIZERS["adam"]())
    train()

    def manager(saved: str, kind: str) -> Any:
        optimizer = _OPTIMIZERS[kind]()
        build_optimizer(optimizer, model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        return smp.CheckpointManager(checkpoint, str(Path(folder, saved)))

    for saved, others in (("adam", ("sgd", "momentum", "rmsprop")), ("sgd", ("adam",))):
        manager(saved, saved).save()
        for other in others:
            with pytest.raises(CheckpointError, match="restore it into the model and optimizer"):
                manager(saved, other).restore()
        assert manager(saved, saved).restore()


def other_variables(side: Side, folder: str) -> None:
    """What an optimizer keeps of a variable is saved with it, and never left out in silence."""
    import smdistributed.modelparallel.tensorflow as smp

    make = tf.keras.Variable if hasattr(tf.keras, "Variable") else tf.Variable

    def trained() -> tuple[Any, Any]:
        extra, optimizer = make([1.0]), _OPTIMIZERS["momentum"]()
        build_optimizer(optimizer, [extra])
        return extra, optimizer

    def update(extra: Any, optimizer: Any) -> float:
        optimizer.apply_gradients([(tf.constant([1.0]), extra)])
        return float(tf.convert_to_tensor(extra)[0])

    extra, optimizer = trained()
    update(extra, optimizer)
    alone = smp.CheckpointManager(tf.train.Checkpoint(optimizer=optimizer), folder)
    with pytest.raises(SMPError, match="which it trains, and of which it keeps state"):
        alone.save()
    smp.CheckpointManager(tf.train.Checkpoint(optimizer=optimizer, extra=extra), folder).save()
    expected = update(extra, optimizer)
    extra, optimizer = trained()
    kept = tf.train.Checkpoint(optimizer=optimizer, extra=extra)
    smp.CheckpointManager(kept, folder).restore()
    assert update(extra, optimizer) == expected


def other_models(side: Side, folder: str) -> None:
    """A checkpoint goes into another model before its first step, with its optimizer or alone."""
    import smdistributed.modelparallel.tensorflow as smp

    optimizer = _OPTIMIZERS["momentum"]()
    model, train = _trained(side, optimizer)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    writer = smp.CheckpointManager(checkpoint, folder)
    train()
    writer.save()
    expected = [train() for _ in range(2)]
    for has_optimizer in (True, False):
        optimizer = _OPTIMIZERS["momentum"]()
        model, train = _trained(side, optimizer)
        kept = {"model": model, "optimizer": optimizer} if has_optimizer else {"model": model}
        reader = smp.CheckpointManager(tf.train.Checkpoint(**kept), folder)
        assert reader.restore()
        found = [train() for _ in range(2)]
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        assert np.allclose(found[1], expected[1], rtol=1e-6) is has_optimizer


def unnamed_models(side: Side, folder: str) -> None:
    """A checkpoint goes into a model whose layers Keras has numbered on, with its optimizer."""
    import smdistributed.modelparallel.tensorflow as smp

    results = []
    for number in range(2):
        # Nine and ten have another order as text than as numbers.
        L.Dense(1) if number else [L.Dense(1) for _ in range(8)]
        model = _sequential(side)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = smp.CheckpointManager(checkpoint, folder)
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        if number == 0:
            model.fit(rows(), rows(1), epochs=2, **options)
            manager.save()
        else:
            manager.restore()
            with pytest.warns(UserWarning, match=r"other numbers \(.* in the order of these"):
                model.predict(rows(), verbose=0)
        results += [model.predict(rows(), verbose=0)]
        history = model.fit(rows(2), rows(3), epochs=2, **options).history["loss"]
        results += [np.float32(history)]
    for one, other in zip(results[:2], results[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
