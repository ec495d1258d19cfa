"""Optimizers that get no gradients in a process, where others may have some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.optimizers import whole_model

pytestmark = pytest.mark.skipif(not keras.IS_KERAS_3, reason="Keras 2 has neither")


@pytest.fixture(autouse=True)
def _with_others() -> Iterator[None]:
    with whole_model(lambda given, norm, variables: given, lambda own: own, lambda variables: True):
        yield


def test_a_scale_of_losses_that_was_not_made_is_not_lost() -> None:
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    with pytest.raises(UnsupportedError, match=r"call optimizer\.build"):
        scaling.apply_gradients([])
    scaling.apply_gradients([(None, tf.keras.Variable(1.0))])
    assert int(tf.convert_to_tensor(scaling.iterations)) == 1


def test_a_norm_of_all_is_not_asked_for_at_other_times() -> None:
    optimizer = tf.keras.optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)
    with pytest.raises(UnsupportedError, match="leave one of the two out"):
        optimizer.apply_gradients([])
