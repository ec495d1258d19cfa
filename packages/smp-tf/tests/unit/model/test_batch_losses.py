"""What the loss of a batch is made of, and what it cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.model.batch_losses import refuse_sums, weighed_by_masks
from smdistributed.modelparallel.tensorflow.stepping.output import StepOutput

MeanSquaredError = tf.keras.losses.MeanSquaredError


class OwnLoss:
    """A model that computes its loss itself."""

    _smp_engine = SimpleNamespace(name="own", newest=(SimpleNamespace(num_losses=0), None))

    def compute_loss(self) -> None: ...


def _outputs(*values: Any) -> StepOutput:
    return StepOutput([tf.constant(each) for each in values], [0.5, 0.5])


@pytest.mark.parametrize(
    "losses", [{"a": "mse", "b": None}, MeanSquaredError(), [abs, "mae"], None]
)
def test_means_are_taken(losses: Any) -> None:
    refuse_sums(losses, 4)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sums_are_refused_with_several_microbatches(reduction: str) -> None:
    losses = ["mse", MeanSquaredError(reduction=reduction)]
    with pytest.raises(UnsupportedError, match=f"a loss with the reduction '{reduction}'"):
        refuse_sums(losses, 4)
    refuse_sums(losses, 1)


def test_a_masked_loss_that_is_not_known_to_be_a_mean_is_warned_of() -> None:
    loss, result = _outputs(1.0, 2.0), _outputs([[1.0]], [[2.0]])
    masks = {0: _outputs([[True]], [[False]])}
    with pytest.warns(UserWarning, match="results of own have masks"):
        assert weighed_by_masks(OwnLoss(), [None], loss, result, masks) == ([None], loss)
    assert weighed_by_masks(OwnLoss(), [None], loss, result, {}) == ([None], loss)


def test_losses_of_keras_alone_are_known_to_be_means() -> None:
    class ScalarError(MeanSquaredError):  # type: ignore[misc, valid-type]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(super().call(y_true, y_pred))

    wrap = keras.private("losses" if not keras.IS_KERAS_3 else "losses.losses").LossFunctionWrapper
    assert keras.is_mean(MeanSquaredError())
    assert keras.is_mean(wrap(tf.keras.losses.get("mae")))
    assert not keras.is_mean(MeanSquaredError(reduction="sum"))
    for loss in (ScalarError(), wrap(lambda y, found: tf.reduce_mean(y - found)), abs):
        assert not keras.is_mean(loss)
