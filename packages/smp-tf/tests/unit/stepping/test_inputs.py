"""Arguments of a step as those of its microbatches, by the structure that tensors are in."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.microbatch import SplitRules, signature_of
from smdistributed.modelparallel.tensorflow.stepping.inputs import split

X = np.arange(8.0, dtype=np.float32).reshape(4, 2)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any


class Holder(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = tf.Variable(X)


def parts_of(value: Any) -> list[Any]:
    rules = SplitRules(signature_of(lambda given: None))
    cut, weights = split(rules, 2, (value,), {})
    assert list(weights) == [0.5, 0.5]
    return [args[0] for args, _ in cut.calls]


@pytest.mark.parametrize(
    ("value", "x_of"),
    [
        ([tf.constant(X), 1], lambda part: part[0]),
        ((X, {"y": 2}), lambda part: part[0]),
        (Pair(tf.constant(X), 1), lambda part: part.x),
        ({"x": tf.constant(X)}, lambda part: part["x"]),
        (OrderedDict(x=tf.constant(X)), lambda part: part["x"]),
        (defaultdict(list, x=tf.constant(X)), lambda part: part["x"]),
        (UserDict(x=tf.constant(X)), lambda part: part["x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_results_are_taken_apart_in_is_cut(value: Any, x_of: Any) -> None:
    for index, part in enumerate(parts_of(value)):
        assert type(part) is type(value)
        np.testing.assert_array_equal(x_of(part), X[2 * index : 2 * index + 2])


@pytest.mark.parametrize(
    "value", [Record(tf.constant(X)), SimpleNamespace(x=X)], ids=["data class", "name space"]
)
def test_what_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"given is a .*, of shape \(4, 2\), looks like examples"):
        parts_of(value)


def test_a_list_that_may_have_an_entry_an_example_is_refused() -> None:
    with pytest.raises(ConfigError, match="given has 4 entries, as many as the batch"):
        parts_of([{"x": tf.constant(X)} for _ in range(4)])


def test_models_stay_whole() -> None:
    holder = Holder()
    assert parts_of([holder, tf.constant(X)])[0][0] is holder


def test_of_a_batch_of_unknown_size_nothing_is_refused() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def second(x: Any) -> Any:
        return parts_of_unknown([{"x": x}, {"x": x}])[1][0]["x"]

    def parts_of_unknown(value: Any) -> list[Any]:
        cut, _ = split(SplitRules(signature_of(lambda given: None)), 2, (value,), {})
        return [args[0] for args, _ in cut.calls]

    np.testing.assert_array_equal(second(X), X[2:])
