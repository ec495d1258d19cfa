"""Calls have one key if, and only if, one graph serves them."""

from __future__ import annotations

import argparse
import threading
from collections import namedtuple
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.record.likeness import Likeness, spec_of


class Silent:
    """Two of these look the same."""

    def __repr__(self) -> str:
        return "Silent()"


_X = tf.zeros([2])
_RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0]])
_Point = namedtuple("_Point", "a b")
_Spot = namedtuple("_Spot", "a b")


def _key(value: Any) -> Hashable:
    return Likeness(value, spec_of)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"plus": _X}, {"minus": _X}),
        ({"l": {"x": _X}}, {"l": {"y": _X}}),
        ([_X, _X], (_X, _X)),
        ([_X, [_X]], [[_X], _X]),
        (_Point(_X, _X), _Spot(_X, _X)),
        ((_X, None), (None, _X)),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        (np.float32(1), np.float64(1)),
        (Silent(), Silent()),
        ({1}, {2}),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        (tf.zeros([3]), _X),
        (_RAGGED, tf.cast(_RAGGED, tf.float64)),
        (_RAGGED, _RAGGED.with_row_splits_dtype(tf.int32)),
        (_RAGGED, tf.sparse.from_dense([[1.0, 0.0], [2.0, 3.0]])),
    ],
)
def test_other_calls_have_another_key(one: Any, other: Any) -> None:
    assert _key(one) != _key(other)


_OBJECT = Silent()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": _X, "b": [_X]}, {"b": [_X + 1.0], "a": _X}),
        (float("nan"), float("nan")),
        (_OBJECT, _OBJECT),
        ({1, 2}, {2, 1}),
        (argparse.Namespace(a=1), argparse.Namespace(a=1)),
        (np.zeros(2, np.float32), _X),
    ],
)
def test_equal_calls_have_one_key(one: Any, other: Any) -> None:
    assert _key(one) == _key(other)
    assert hash(_key(one)) == hash(_key(other))


def test_what_changes_later_is_another_one() -> None:
    options = argparse.Namespace(scale=1)
    before = _key(options)
    options.scale = 2
    assert before != _key(options)


def test_what_changes_and_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="must be hashable, or can be copied"):
        _key(argparse.Namespace(lock=threading.Lock()))
