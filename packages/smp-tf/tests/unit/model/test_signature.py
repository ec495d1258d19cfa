"""Calls that one trace serves have one key, and can be repeated with other tensors."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.model.signature import signature

_X = tf.zeros([2, 3])


def test_calls_of_other_numbers_have_the_same_key() -> None:
    first = signature((_X,), {"training": True})
    assert first.key == signature((_X + 1.0,), {"training": True}).key
    assert first.key == signature((np.zeros([2, 3], np.float32),), {"training": True}).key


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((tf.zeros([4, 3]),), {"training": True}),
        ((tf.zeros([2, 3], tf.float64),), {"training": True}),
        ((_X,), {"training": False}),
        ((_X, _X), {"training": True}),
    ],
)
def test_shapes_dtypes_and_other_values_count(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    assert signature((_X,), {"training": True}).key != signature(args, kwargs).key


def test_arguments_take_other_tensors() -> None:
    asked = signature(({"x": _X, "mode": "sum"},), {"y": _X})
    assert asked.arguments([1, 2]) == (({"x": 1, "mode": "sum"},), {"y": 2})
