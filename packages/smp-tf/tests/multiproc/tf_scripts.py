"""Scripts as users of Keras write them: every model trained in every way, see ``tf_beside``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH
from tf_users import model_of

L = tf.keras.layers
ROWS = 16
BATCH = 8
WORDS = 9
TIMES = 6


# ------------------------------------------------------------------ models


def _given(side: Side, model: Any) -> Any:
    return model if side.base is tf.keras.Model else side.base(model)


def _numbers(seed: int, *shape: int) -> Any:
    return np.random.RandomState(seed).standard_normal((ROWS, *shape)).astype("float32")


def _tokens(seed: int) -> Any:
    found = np.random.RandomState(seed).randint(1, WORDS, (ROWS, TIMES))
    found[::2, TIMES - 2 :] = 0
    return found


def _sequential(side: Side) -> Any:
    layers = [
        tf.keras.Input((WIDTH,)),
        L.Dense(WIDTH, "tanh", name="a"),
        L.LayerNormalization(name="norm"),
        L.Dense(WIDTH, "relu", name="b"),
        L.Dense(1, name="head"),
    ]
    return _given(side, tf.keras.Sequential(layers))


def _functional(side: Side) -> Any:
    ends = {name: tf.keras.Input((WIDTH,), name=name) for name in ("left", "right")}
    parts = [L.Dense(WIDTH, "tanh", name=f"of_{name}")(end) for name, end in ends.items()]
    x = L.Dense(WIDTH, "gelu", name="both")(L.Concatenate()(parts))
    outputs = L.Dense(1, name="head")(L.Add()([x, parts[0]]))
    return _given(side, tf.keras.Model(ends, outputs))


def _subclassed(side: Side) -> Any:
    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = x + model.inner(model.first(x))
        with side.part(1):
            return model.head(x * model.scale.kernel[0])

    return model_of(
        side,
        call,
        first=lambda: L.Dense(WIDTH, "tanh", name="first"),
        inner=lambda: tf.keras.Sequential([L.Dense(WIDTH, "relu", name="inner")]),
        scale=lambda: _built(L.Dense(WIDTH, name="scale")),
        head=lambda: L.Dense(1, name="head"),
    )


def _built(layer: Any) -> Any:
    layer.build((None, WIDTH))
    return layer


def _embedding(side: Side) -> Any:
    inputs = tf.keras.Input((TIMES,), dtype="int32")
    x = L.Embedding(WORDS, WIDTH, name="table")(inputs)
    x = L.Dense(WIDTH, "tanh", name="middle")(L.GlobalAveragePooling1D()(x))
    return _given(side, tf.keras.Model(inputs, L.Dense(1, name="head")(x)))


def _recurrent(side: Side) -> Any:
    layers = [
        tf.keras.Input((TIMES,), dtype="int32"),
        L.Embedding(WORDS, WIDTH, mask_zero=True, name="table"),
        L.GRU(WIDTH, return_sequences=True, name="gru"),
        L.Bidirectional(L.LSTM(3, name="lstm"), name="both_ways"),
        L.Dense(1, name="head"),
    ]
    return _given(side, tf.keras.Sequential(layers))


def _convolutional(side: Side) -> Any:
    inputs = tf.keras.Input((TIMES, TIMES, 2))
    x = L.Conv2D(4, 3, padding="same", activation="tanh", name="conv")(inputs)
    x = L.GroupNormalization(2, name="groups")(L.SeparableConv2D(4, 3, name="apart")(x))
    x = L.Flatten()(L.AveragePooling2D(2)(x))
    return _given(side, tf.keras.Model(inputs, L.Dense(1, name="head")(x)))


def _penalized(side: Side) -> Any:
    of = tf.keras.regularizers
    layers = [
        tf.keras.Input((WIDTH,)),
        L.Dense(WIDTH, "tanh", kernel_regularizer=of.L1L2(0.01, 0.02), name="a"),
        L.Dense(WIDTH, activity_regularizer=of.L2(0.01), name="b"),
        L.Dense(1, kernel_constraint=tf.keras.constraints.MaxNorm(0.8), name="head"),
    ]
    return _given(side, tf.keras.Sequential(layers))


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        make: returns one.
        inputs: returns those of all rows, by a seed.
    """

    make: Callable[[Side], Any]
    inputs: Callable[[int], Any]


KINDS = {
    "sequential": Kind(_sequential, lambda seed: _numbers(seed, WIDTH)),
    "functional": Kind(
        _functional,
        lambda seed: {"left": _numbers(seed, WIDTH), "right": _numbers(seed + 7, WIDTH)},
    ),
    "subclassed": Kind(_subclassed, lambda seed: _numbers(seed, WIDTH)),
    "embedding": Kind(_embedding, _tokens),
    "recurrent": Kind(_recurrent, _tokens),
    "convolutional": Kind(_convolutional, lambda seed: _numbers(seed, TIMES, TIMES, 2)),
    "penalized": Kind(_penalized, lambda seed: _numbers(seed, WIDTH)),
}


# ------------------------------------------------------------------ ways to train


class Script(NamedTuple):
    """What a way to train is given.

    Attributes:
        side: where.
        kind: of the model.
        model: that is trained.
    """

    side: Side
    kind: Kind
    model: Any

    def batch(self, number: int) -> tuple[Any, Any]:
        """Returns a batch of tensors."""
        x, y = self.rows(number)
        first = tf.nest.map_structure(lambda each: tf.constant(each[:BATCH]), x)
        return first, tf.constant(y[:BATCH])

    def rows(self, number: int = 0) -> tuple[Any, Any]:
        """Returns inputs and targets as arrays."""
        return self.kind.inputs(number), _numbers(number + 20, 1)

    def of(self, same: list[Any]) -> Found:
        """Returns what was found, and the weights."""
        return Found(same, by_name(self.model.trainable_variables, self.model.trainable_variables))

    def history(self, *found: Any) -> Found:
        """Returns histories of ``fit``, and the weights."""
        same: list[Any] = []
        for each in found:
            for key in sorted(each.history):
                same += [key, np.array(each.history[key], np.float32)]
        return self.of(same)


def _loss(model: Any, x: Any, y: Any) -> Any:
    loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
    return tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in model.losses)])


def _computing(script: Script, loss_of: Any = _loss) -> Any:
    """Returns a step function that computes gradients and a loss."""
    model = script.model

    @script.side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        return tape.gradient(loss, model.trainable_variables), loss

    return compute


def _means(gradients: Any) -> list[Any]:
    return [None if each is None else each.accumulate() for each in gradients]


def _pairs(script: Script, means: Any) -> list[Any]:
    pairs = zip(means, script.model.trainable_variables, strict=True)
    return [pair for pair in pairs if pair[0] is not None]


def loop(script: Script) -> Found:
    """A step, the optimizer after it, and the loss in a list."""
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    compute, same = _computing(script), []
    for number in range(3):
        gradients, loss = compute(*script.batch(number))
        optimizer.apply_gradients(_pairs(script, _means(gradients)))
        same.append(loss.reduce_mean())
    return script.of(same)


def function(script: Script) -> Found:
    """The whole training step as a ``tf.function``."""
    optimizer, compute = tf.keras.optimizers.Adam(0.01), _computing(script)

    @tf.function
    def train(x: Any, y: Any) -> Any:
        gradients, loss = compute(x, y)
        optimizer.apply_gradients(_pairs(script, _means(gradients)))
        return loss.reduce_mean()

    return script.of([train(*script.batch(number)) for number in range(3)])


def clipped(script: Script) -> Found:
    """Gradients of the step by their norm, which is logged."""
    optimizer, compute, same = tf.keras.optimizers.RMSprop(0.01), _computing(script), []
    for number in range(3):
        gradients, loss = compute(*script.batch(number))
        means, norm = tf.clip_by_global_norm(_means(gradients), 0.1)
        optimizer.apply_gradients(_pairs(script, means))
        same += [loss.reduce_mean(), norm]
    return script.of(same)


def two_optimizers(script: Script) -> Found:
    """One for the head, one for what is below it."""
    head, body = tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.Adagrad(0.1)
    compute, same = _computing(script), []
    for number in range(3):
        gradients, loss = compute(*script.batch(number))
        pairs = _pairs(script, _means(gradients))
        head.apply_gradients(pairs[-2:])
        body.apply_gradients(pairs[:-2])
        same.append(loss.reduce_mean())
    return script.of(same)


def accumulated(script: Script) -> Found:
    """Gradients of two batches in one update."""
    optimizer, compute, same = tf.keras.optimizers.SGD(0.1), _computing(script), []
    for number in range(2):
        sums: list[Any] = []
        for part in range(2):
            gradients, loss = compute(*script.batch(2 * number + part))
            means = [tf.convert_to_tensor(each) for each in _means(gradients) if each is not None]
            sums = [a + b for a, b in zip(sums, means, strict=True)] if sums else means
            same.append(loss.reduce_mean())
        variables = [pair[1] for pair in _pairs(script, _means(gradients))]
        optimizer.apply_gradients(zip([0.5 * each for each in sums], variables, strict=True))
    return script.of(same)


def metrics(script: Script) -> Found:
    """Metrics of the results, with their states put back in between."""
    optimizer, same = tf.keras.optimizers.Adamax(0.01), []
    mean, error = tf.keras.metrics.Mean(), tf.keras.metrics.RootMeanSquaredError()
    model = script.model

    @script.side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = tf.keras.losses.Huber()(y, found)
        return tape.gradient(loss, model.trainable_variables), loss, found

    for number in range(3):
        x, y = script.batch(number)
        gradients, loss, found = compute(x, y)
        optimizer.apply_gradients(_pairs(script, _means(gradients)))
        mean.update_state(loss.reduce_mean())
        error.update_state(y, found.merge())
        same += [mean.result(), error.result()]
        if number == 1:
            mean.reset_state()
    return script.of(same)


def persistent(script: Script) -> Found:
    """A persistent tape, asked for two losses by other variables each."""
    model, optimizer, same = script.model, tf.keras.optimizers.SGD(0.1), []

    @script.side.step
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            found = model(x, training=True)
            one, other = tf.reduce_mean((found - y) ** 2), tf.reduce_mean(tf.abs(found))
        variables = model.trainable_variables
        first = tape.gradient(one, variables[:2])
        return first + tape.gradient(other, variables[2:]), one, other

    for number in range(3):
        gradients, one, other = compute(*script.batch(number))
        optimizer.apply_gradients(_pairs(script, _means(gradients)))
        same += [one.reduce_mean(), other.reduce_mean()]
    return script.of(same)


def halves(script: Script) -> Found:
    """Losses in ``mixed_float16``'s scale, by hand, with what overflows left out."""
    compute = _computing(script, lambda model, x, y: 64.0 * _loss(model, x, y))
    optimizer, same = tf.keras.optimizers.SGD(0.05), []
    for number in range(3):
        gradients, loss = compute(*script.batch(number))
        means = [None if each is None else each / 64.0 for each in map(_dense, _means(gradients))]
        if all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in means if each is not None):
            optimizer.apply_gradients(_pairs(script, means))
        same.append(loss.reduce_mean() / 64.0)
    return script.of(same)


def _dense(value: Any) -> Any:
    return value if value is None else tf.convert_to_tensor(value)


def restored(script: Script) -> Found:
    """Weights in a file of Keras, and back into the model after it was trained on."""
    optimizer, compute, same = tf.keras.optimizers.SGD(0.1), _computing(script), []

    def train(number: int) -> None:
        gradients, loss = compute(*script.batch(number))
        optimizer.apply_gradients(_pairs(script, _means(gradients)))
        same.append(loss.reduce_mean())

    train(0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "own.weights.h5"))
        script.model.save_weights(path)
        train(1)
        script.model.load_weights(path)
    train(2)
    return script.of(same)


def copied(script: Script) -> Found:
    """Weights of a model in another one of its kind, which is trained on."""
    optimizer, compute = tf.keras.optimizers.SGD(0.1), _computing(script)
    gradients, loss = compute(*script.batch(0))
    optimizer.apply_gradients(_pairs(script, _means(gradients)))
    other = script._replace(model=script.kind.make(script.side))
    again = _computing(other)
    again(*script.batch(0))
    other.model.set_weights(script.model.get_weights())
    gradients, later = again(*script.batch(1))
    tf.keras.optimizers.SGD(0.2).apply_gradients(_pairs(other, _means(gradients)))
    return other.of([loss.reduce_mean(), later.reduce_mean()])


def frozen(script: Script) -> Found:
    """A layer is frozen for some steps, and trains again."""
    optimizer, same, model = tf.keras.optimizers.SGD(0.1), [], script.model
    _computing(script)(*script.batch(9))
    optimizer.build(model.trainable_variables)
    layer = next(each for each in model.layers if each.trainable_variables)
    for number, trains in enumerate((False, True)):
        layer.trainable = trains
        gradients, loss = _computing(script)(*script.batch(number))
        optimizer.apply_gradients(_pairs(script, _means(gradients)))
        same += [loss.reduce_mean(), np.float32(len(model.trainable_variables))]
    return script.of(same)


FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def callbacks(script: Script) -> Found:
    """``fit`` with an early stop, a falling rate, a log, and validation."""
    x, y = script.rows()
    seen: list[Any] = []
    script.model.compile(tf.keras.optimizers.SGD(0.1, clipnorm=1.0), "mse", metrics=["mae"])
    each = [
        tf.keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=10.0),
        tf.keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10.0),
        tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, logs: seen.append(np.float32(logs["mae"]))
        ),
    ]
    found = script.model.fit(x, y, epochs=4, validation_split=0.5, callbacks=each, **FIT)
    found = script.history(found)
    return found._replace(same=[*found.same, *seen])


def dataset(script: Script) -> Found:
    """``fit`` on a dataset with weights of examples, a schedule, and decayed weights."""
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    optimizer = tf.keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=0.5)
    script.model.compile(optimizer, "mse", weighted_metrics=["mae"])
    weights = np.linspace(0.5, 1.5, ROWS).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((*script.rows(), weights)).batch(BATCH)
    return script.history(script.model.fit(data, epochs=2, verbose=0))


def evaluated(script: Script) -> Found:
    """``fit`` with averaged weights, then ``evaluate`` and ``predict``."""
    x, y = script.rows()
    optimizer = tf.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    script.model.compile(optimizer, tf.keras.losses.LogCosh(), metrics=["mse"])
    found = script.history(script.model.fit(x, y, epochs=2, **FIT))
    same = list(script.model.evaluate(x, y, batch_size=BATCH, verbose=0))
    results = script.model.predict(x, batch_size=BATCH, verbose=0)
    return found._replace(same=[*found.same, *map(np.float32, same), np.array(results)])


WAYS = {
    each.__name__: each
    for each in (
        *(loop, function, clipped, two_optimizers, accumulated, metrics, persistent, halves),
        *(restored, copied, frozen, callbacks, dataset, evaluated),
    )
}
ALL = [(kind, way) for kind in KINDS for way in WAYS]


def train(side: Side, kind: str, way: str) -> Found:
    """Trains a model of a kind in a way."""
    policy = tf.keras.mixed_precision.global_policy()
    if way == "halves":
        tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        tf.keras.utils.set_random_seed(3)
        script = Script(side, KINDS[kind], KINDS[kind].make(side))
        return WAYS[way](script)
    finally:
        tf.keras.mixed_precision.set_global_policy(policy)
