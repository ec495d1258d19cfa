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
