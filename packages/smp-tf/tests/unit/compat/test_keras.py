"""The installed Keras has what the package takes of it beyond its public API."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import keras


@pytest.mark.parametrize("kind", keras.optimizer_kinds("Adam"))
def test_an_optimizer_keeps_two_numbers_for_each_it_trains(kind: Any) -> None:
    make = tf.keras.Variable if keras.IS_KERAS_3 else tf.Variable
    trained = [make(tf.ones([size])) for size in (2, 3)]
    optimizer = kind(0.1)
    keras.build_optimizer(optimizer, trained)
    slots = keras.optimizer_slots(optimizer)
    assert len(slots) == 2
    for own in slots.values():
        kept = [own[keras.slot_key(optimizer, each)] for each in trained]
        assert [tuple(each.shape) for each in kept] == [(2,), (3,)]
        every = [id(each) for each in keras.optimizer_variables(optimizer)]
        assert all(id(each) in every for each in kept)


def _names_of_training() -> list[str]:
    if not keras.IS_KERAS_3:
        return ["compile", "compute_loss", "fit", "metrics", "predict_step", "train_step"]
    parts = (
        keras.private("trainers.trainer").Trainer,
        keras.private("backend.tensorflow.trainer").TensorFlowTrainer,
    )
    return sorted({name for part in parts for name in vars(part) if not name.startswith("__")})


@pytest.mark.parametrize("name", _names_of_training())
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_training_loop_of_ones_own_is_found(name: str, is_inherited: bool) -> None:
    own = type("Own", (tf.keras.Sequential,), {name: lambda self, *args: None})
    kind = type("Heir", (own,), {"call": lambda self, x: x}) if is_inherited else own
    assert keras.own_training(object.__new__(kind)) == [name]


def test_kerass_own_models_have_none() -> None:
    inputs = tf.keras.Input((2,))
    for model in (tf.keras.Sequential(), tf.keras.Model(inputs, inputs)):
        assert keras.own_training(model) == []
        assert keras.signature_of_call(model) is None
