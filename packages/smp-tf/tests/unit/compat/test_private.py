"""The installed TensorFlow has what the package takes of it beyond its public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import private


def test_what_is_used_of_tensorflow_works() -> None:
    private.self_test()


def test_variables_are_measured_by_their_handles() -> None:
    assert private.variable_bytes(tf.Variable(tf.zeros([3, 5], tf.float64)).handle) == 120


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
    with private.checked_access(seen.append):
        for access in accesses:
            seen.clear()
            access()
            assert seen
            assert all(each is variable for each in seen)
    seen.clear()
    for access in accesses:
        access()
    assert not seen


def test_tensorflow_reads_the_state_of_checkpoints(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("ckpt-1", "ckpt-2")]
    private.write_checkpoint_state(str(tmp_path), paths[-1], paths)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == paths[-1]
    assert list(state.all_model_checkpoint_paths) == paths
