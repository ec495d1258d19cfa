"""What optimizers decide by the gradients of a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.optimizers import whole_model

_KERAS_3 = pytest.mark.skipif(not keras.IS_KERAS_3, reason="Keras 2 has none")


@pytest.fixture
def with_others() -> Iterator[None]:
    def is_elsewhere(variable: Any) -> bool:
        return str(variable.name).startswith("elsewhere")

    with whole_model(
        lambda norm_of, gradients, variables: norm_of(gradients),
        lambda own: own,
        is_elsewhere,
        lambda slot, reference: None,
        list,
        lambda gradients, variables: None,
    ):
        yield


def _after_slices(kind: Any) -> Any:
    """Returns a table after updates by slices, of which two are of one row."""
    table = (tf.keras.Variable if keras.IS_KERAS_3 else tf.Variable)(np.ones((3, 2), "float32"))
    optimizer = kind(0.1, global_clipnorm=0.5)
    for values in ([[1.0, 2.0], [3.0, -1.0]], [[0.5, 0.1], [0.2, 0.3]]):
        slices = tf.IndexedSlices(tf.constant(values), tf.constant([1, 1]), tf.constant([3, 2]))
        optimizer.apply_gradients([(slices, table)])
    return np.array(tf.convert_to_tensor(table))


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_slices_are_clipped_as_keras_does_it(name: str, request: pytest.FixtureRequest) -> None:
    kinds = keras.optimizer_kinds(name)
    expected = [_after_slices(kind) for kind in kinds]
    request.getfixturevalue("with_others")
    for kind, table in zip(kinds, expected, strict=True):
        np.testing.assert_allclose(_after_slices(kind), table, 1e-6)


@_KERAS_3
@pytest.mark.usefixtures("with_others")
def test_a_scale_of_losses_that_was_not_made_is_not_lost() -> None:
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    scaling.apply_gradients([(tf.constant(1.0), tf.keras.Variable(1.0, name="elsewhere"))])
    assert int(tf.convert_to_tensor(scaling.iterations)) == 1


@_KERAS_3
@pytest.mark.usefixtures("with_others")
def test_a_norm_of_all_is_not_asked_for_at_other_times() -> None:
    optimizer = tf.keras.optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)
    with pytest.raises(UnsupportedError, match="leave one of the two out"):
        optimizer.apply_gradients([(tf.constant(1.0), tf.keras.Variable(1.0, name="elsewhere"))])


@pytest.mark.skipif(keras.IS_KERAS_3, reason="Keras 3 counts once an update")
@pytest.mark.usefixtures("with_others")
def test_nadam_of_some_variables_is_refused_in_functions() -> None:
    variables = [tf.Variable(1.0, name=name) for name in ("here", "elsewhere")]

    def update(optimizer: Any) -> None:
        optimizer.apply_gradients([(tf.constant(1.0), each) for each in variables])

    update(tf.keras.optimizers.Nadam())
    with pytest.raises(UnsupportedError, match="outside of functions"):
        tf.function(update)(tf.keras.optimizers.Nadam())
