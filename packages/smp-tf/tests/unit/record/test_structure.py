"""Nested data comes apart into tensors and the rest, and together again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.record.structure import Structure


def test_tensors_are_replaced_and_the_rest_stays() -> None:
    structure = Structure({"b": [tf.constant(1), "word"], "a": (None, tf.constant(2))})
    assert structure.others == [None, "word"]
    assert structure.filled(["first", "second"]) == {"b": ["second", "word"], "a": (None, "first")}


def test_sparse_tensors_come_apart_if_wanted() -> None:
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    apart = Structure([sparse])
    assert apart.are_tensors == (True, True, True)
    (again,) = apart.filled([sparse.indices, 2 * sparse.values, sparse.dense_shape])
    assert tf.sparse.to_dense(again).numpy().tolist() == [[0, 2], [4, 0]]
    assert apart.filled([sparse.indices, 3 * sparse.values, sparse.dense_shape])[0].shape == [2, 2]


def test_what_was_taken_out_is_not_kept() -> None:
    class Array(np.ndarray):  # type: ignore[type-arg]
        pass

    def is_array(value: Any) -> bool:
        return isinstance(value, np.ndarray)

    array = np.zeros(2).view(Array)
    known = weakref.ref(array)
    structure = Structure({"x": array}, is_array)
    del array
    gc.collect()
    assert known() is None
    assert structure.filled([3]) == {"x": 3}
