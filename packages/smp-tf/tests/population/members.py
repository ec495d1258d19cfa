"""The models of the population: each is trained with the library and without."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import networks
import numpy as np
import tensorflow as tf
import tf_calls
import tf_effects
import tf_fit
import tf_gradients
import tf_habits_fit
import tf_habits_gradients
import tf_habits_layers
import tf_habits_loops
import tf_habits_losses
import tf_habits_networks
import tf_habits_updates
import tf_meetings
import tf_replicas
import tf_state
import tf_tapes
import tf_users_fit
import tf_users_layers
import tf_users_python
import tf_users_training
import uses_of_fit
import uses_of_layers
import uses_of_penalties
import uses_of_recipes
import uses_of_state
import uses_of_training
from making import BATCH, given
from tf_beside import Found, Side

L = tf.keras.layers
#: Side of the images that the smallest model of each family of ``tf.keras.applications`` takes.
_IMAGES = {
    "VGG16": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "ConvNeXtTiny": 32,
    "NASNetMobile": 32,
    "Xception": 71,
    "InceptionV3": 75,
    "InceptionResNetV2": 75,
    # With Keras 2 only.
    "RegNetX002": 32,
    "ResNetRS50": 32,
}


def _numbers(*shape: int) -> Any:
    return np.random.RandomState(0).standard_normal(shape)


@contextlib.contextmanager
def _double() -> Iterator[None]:
    """Within, models compute in double precision: what differs then is no rounding."""
    saved, policy = tf.keras.backend.floatx(), tf.keras.mixed_precision.global_policy()
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")
    try:
        yield
    finally:
        tf.keras.backend.set_floatx(saved)
        tf.keras.mixed_precision.set_global_policy(policy)


def train(
    side: Side,
    make: Callable[[], Any],
    *shape: int,
    training: bool = True,
    is_moved: bool = False,
) -> Found:
    """Trains a model for two steps; returns the losses and the last gradients.

    Args:
        side: where.
        make: returns the model.
        shape: of an example.
        training: the mode of the model.
        is_moved: takes the neighbour of each number of the batch.
    """
    batch = _numbers(BATCH, *shape)
    if is_moved:
        batch = np.nextafter(batch, np.inf)
    with _double():
        return _train(side, given(side, make()), tf.constant(batch), training)


def _train(side: Side, model: Any, batch: Any, training: bool) -> Found:
    # Small steps: normalisations of few numbers make much of rounding when weights are large.
    optimizer = tf.keras.optimizers.SGD(1e-5)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(x, training=training))
            loss = tf.add_n([tf.reduce_mean(tf.square(each - 0.1)) for each in outputs])
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for _ in range(2):
        gradients, loss = compute(batch)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients([(g.accumulate(), v) for g, v in pairs if g is not None])
        losses.append(loss.reduce_mean())
    every = model.trainable_variables
    if side.base is not tf.keras.Model:
        every = model._smp_engine.everywhere()[0]
    places = {id(variable): str(place) for place, variable in enumerate(every)}
    pairs = zip(gradients, model.trainable_variables, strict=True)
    found = {id(v): g.accumulate() for g, v in pairs if g is not None}
    return Found(losses, {places[key]: found[key] for key in found if key in places})


def _application(name: str) -> Callable[..., Found]:
    # Fifty normalisations over the few numbers of a small image make 1e4 of each rounding, and
    # gradients of 1e5; with their moving averages the same operations are tame. See ``roundings``.
    def member(side: Side, *, training: bool = False, is_moved: bool = False) -> Found:
        shape = (_IMAGES[name], _IMAGES[name], 3)
        sizes = {"MobileNet": 0.25, "MobileNetV2": 0.35}
        options = {"alpha": sizes[name]} if name in sizes else {}

        def make() -> Any:
            model = getattr(tf.keras.applications, name)(
                input_shape=shape, weights=None, include_top=False, pooling="avg", **options
            )
            for layer in model.layers:
                if type(layer).__name__ in ("Dropout", "StochasticDepth"):
                    layer.rate = layer.drop_path_rate = 0.0  # masks are other ones for each cut
            return model

        return train(side, make, *shape, training=training, is_moved=is_moved)

    return member


def _sequential(*layers: Callable[[], Any], shape: tuple[int, ...]) -> Callable[[Side], Found]:
    def member(side: Side) -> Found:
        return train(side, lambda: tf.keras.Sequential([make() for make in layers]), *shape)

    return member


def _transformer() -> Any:
    inputs = tf.keras.Input((6, 16))
    x = inputs
    for _ in range(2):
        y = L.MultiHeadAttention(2, 8)(L.LayerNormalization()(x), x, use_causal_mask=True)
        x = L.Add()([x, y])
        x = L.Add()([x, L.Dense(16)(L.Dense(32, "gelu")(L.LayerNormalization()(x)))])
    return tf.keras.Model(inputs, [L.Dense(3)(x), L.GlobalAveragePooling1D()(x)])


def _meeting(way: tuple[Any, ...]) -> Callable[[Side], Found]:
    return lambda side: tf_meetings.meeting(side, *way)


_MODULES = (
    *(tf_users_layers, tf_users_python, tf_users_training, tf_users_fit, tf_tapes),
    *(networks, uses_of_layers, uses_of_state, uses_of_training, uses_of_fit, uses_of_penalties),
    uses_of_recipes,
    *(tf_habits_gradients, tf_habits_updates, tf_habits_losses, tf_habits_loops),
    *(tf_habits_layers, tf_habits_networks, tf_habits_fit),
)


def families() -> list[str]:
    """Returns the members that are of ``tf.keras.applications``."""
    return [name for name in _IMAGES if hasattr(tf.keras.applications, name)]


MEMBERS: dict[str, Callable[..., Found]] = {
    **{name: _application(name) for name in families()},
    "LSTM": _sequential(
        lambda: L.LSTM(8, return_sequences=True),
        lambda: L.LSTM(8),
        lambda: L.Dense(3),
        shape=(5, 4),
    ),
    "bidirectional GRU": _sequential(
        lambda: L.Bidirectional(L.GRU(8, return_sequences=True)),
        lambda: L.Bidirectional(L.GRU(8)),
        lambda: L.Dense(3),
        shape=(5, 4),
    ),
    "ConvLSTM": _sequential(
        lambda: L.ConvLSTM1D(4, 3), lambda: L.Flatten(), lambda: L.Dense(3), shape=(4, 6, 3)
    ),
    "cells in a loop": _sequential(
        lambda: L.RNN([L.LSTMCell(6), L.GRUCell(6)], return_sequences=True),
        lambda: L.TimeDistributed(L.Dense(3)),
        shape=(5, 4),
    ),
    "attention": lambda side: train(side, _transformer, 6, 16),
    "loops on both halves": tf_effects.loops,
    "normalisation on both ends": tf_effects.repeated_norm,
    "state read and written": tf_effects.read_then_written,
    "variable of the body": tf_effects.written_in_the_body,
    "recomputed layers": tf_calls.recompute,
    "tape in the call": tf_calls.tape_in_call,
    "named arguments": tf_calls.arguments,
    "embeddings with Adam": tf_replicas.embeddings,
    "own initializers": tf_state.initial,
    "gradients of inputs": tf_gradients.of_inputs,
    "several outputs": tf_gradients.of_one_output,
    "transfer learning by fit": tf_fit.transfer,
    "fit with weights and callbacks": tf_fit.options,
    "fit with losses by name": tf_fit.outputs,
    "fit with masks of all lengths": tf_fit.masked,
    **{
        name.replace("_", " "): getattr(module, name)
        for module in _MODULES
        for name in module.NAMES
    },
    **{f"state: {' '.join(map(str, way))}": _meeting(way) for way in tf_meetings.WAYS},
    "gradients of features": tf_users_training.gradients_of_features,
    "penalty with noise": tf_tapes.penalty_with_noise,
    "penalty with dropout": tf_tapes.penalty_with_dropout,
    "gradients by weights again": tf_tapes.gradients_by_weights_again,
    "called in a function": tf_users_python.called_in_a_function,
    "kept by the call": tf_users_training.kept_by_the_call,
    "vectorized": tf_users_python.vectorized,
    "a train_step of one's own": tf_users_fit.own_train_step,
}


def run(name: str, is_alone: bool) -> Found:
    """Runs a member; to be called on every rank."""
    from tf_beside import on_side

    return on_side(MEMBERS[name], is_alone)


def run_in_training_mode(name: str, is_alone: bool, is_moved: bool) -> Found:
    """Runs a family with the statistics of its batches; to be called on every rank."""
    from tf_beside import on_side

    member = functools.partial(MEMBERS[name], training=True, is_moved=is_moved)
    return on_side(member, is_alone)
