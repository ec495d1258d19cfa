"""The installed TensorFlow has what the package takes of it beyond its public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow import compat, keras_compat


def test_what_is_used_of_tensorflow_works() -> None:
    compat.self_test()


def test_variables_are_measured_by_their_handles() -> None:
    assert compat.variable_bytes(tf.Variable(tf.zeros([3, 5], tf.float64)).handle) == 120


def test_access_of_variables_is_checked_and_then_no_longer() -> None:
    variable = tf.Variable(1.0)
    seen: list[Any] = []
    accesses = (
        lambda: variable.assign(2.0),
        lambda: variable.assign_add(1.0),
        lambda: variable.assign_sub(1.0),
        lambda: variable.read_value(),
        lambda: tf.convert_to_tensor(variable),
    )
    with compat.checked_access(seen.append):
        for access in accesses:
            seen.clear()
            access()
            assert seen
            assert all(each is variable for each in seen)
    seen.clear()
    for access in accesses:
        access()
    assert not seen


def _optimizers() -> list[Any]:
    legacy = getattr(tf.keras.optimizers, "legacy", None)
    kinds = [tf.keras.optimizers.Adam]
    # With Keras 3 the legacy names are there and refuse to be used.
    return kinds if keras_compat.IS_KERAS_3 or legacy is None else [*kinds, legacy.Adam]


@pytest.mark.parametrize("kind", _optimizers())
def test_an_optimizer_keeps_two_numbers_for_each_it_trains(kind: Any) -> None:
    make = tf.keras.Variable if keras_compat.IS_KERAS_3 else tf.Variable
    trained = [make(tf.ones([size])) for size in (2, 3)]
    optimizer = kind(0.1)
    keras_compat.build_optimizer(optimizer, trained)
    slots = keras_compat.optimizer_slots(optimizer)
    assert len(slots) == 2
    for own in slots.values():
        kept = [own[keras_compat.slot_key(optimizer, each)] for each in trained]
        assert [tuple(each.shape) for each in kept] == [(2,), (3,)]
        every = [id(each) for each in keras_compat.optimizer_variables(optimizer)]
        assert all(id(each) in every for each in kept)


def test_tensorflow_reads_the_state_of_checkpoints(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("ckpt-1", "ckpt-2")]
    compat.write_checkpoint_state(str(tmp_path), paths[-1], paths)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == paths[-1]
    assert list(state.all_model_checkpoint_paths) == paths
