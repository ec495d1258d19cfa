"""Variables without memory, and who reads them."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.variables import (
    checked_access,
    empty_variable,
    variable_bytes,
)


def test_variables_are_measured_by_their_handles() -> None:
    assert variable_bytes(tf.Variable(tf.zeros([3, 5], tf.float64)).handle) == 120


def test_variables_without_memory_have_what_was_asked_for() -> None:
    constraint = tf.keras.constraints.NonNeg()
    given = {"constraint": constraint, "shape": tf.TensorShape([None, 2]), "trainable": False}
    variable = empty_variable(tf.zeros([3, 2]), given)
    assert variable.constraint is constraint
    assert variable.shape.as_list() == [None, 2]
    assert not variable.trainable
    assert empty_variable(tf.zeros([3, 2]), {}).shape == [3, 2]


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

    def is_here(each: Any) -> bool:
        seen.append(each)
        return True

    with checked_access(
        is_here,
        lambda each: None,
        lambda each: contextlib.nullcontext(),
        seen.append,
        lambda variable, value: False,
    ):
        for access in accesses:
            seen.clear()
            access()
            assert seen
            assert all(each is variable for each in seen)
    seen.clear()
    for access in accesses:
        access()
    assert not seen
