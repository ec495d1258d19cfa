"""Losses of microbatches as parts of the loss of their batch, in Keras's training loop.

The loss of a batch is the mean over its examples, so microbatches count by their sizes. What a mask
leaves out does not count, so a masked loss of microbatches counts by what their masks leave.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.gradients.replicas import averaged
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime
from smdistributed.modelparallel.tensorflow.stepping.output import StepOutput


def refuse_sums(losses: Any, microbatches: int) -> None:
    """Refuses losses that are no means, as ``compile`` takes them.

    Raises:
        UnsupportedError: the loss of several microbatches would not be that of the batch.
    """
    for loss in tf.nest.flatten(losses):
        if microbatches > 1 and keras.sums(loss):
            raise UnsupportedError(
                f"fit and evaluate average losses over {microbatches} microbatches, which is the "
                f"batch's loss for means only; received a loss with the reduction "
                f"{loss.reduction!r}: leave the reduction out, or write a step function, and take "
                "reduce_sum() of its losses and gradients."
            )


def weighed_by_masks(
    model: Any, gradients: Any, loss: Any, results: Any, masks: dict[int, Any]
) -> tuple[Any, Any]:
    """Returns gradients and a loss whose microbatches count by what the masks of results leave.

    Args:
        model: that computed them.
        gradients: structure of StepOutput and None.
        loss: StepOutput.
        results: structure of StepOutput.
        masks: StepOutput by the place of the result.
    """
    if not masks or len(loss.outputs) == 1:
        return gradients, loss
    engine = model._smp_engine
    losses = keras.losses_of(model)
    num_results = len(tf.nest.flatten(results))
    if engine.newest[0].num_losses or num_results > 1 or not all(map(keras.is_mean, losses)):
        losses = []
    if len(losses) != 1:
        warnings.warn(
            f"results of {engine.name} have masks, and its loss has parts that count by other "
            "numbers than one mask leaves (several outputs, losses of layers, a loss of your own): "
            "it is the mean of the losses of microbatches, each of which is a mean of what masks "
            "leave in it. That is the loss of the batch where masks leave as much of each.",
            stacklevel=2,
        )
        return gradients, loss
    counts = [tf.reduce_sum(tf.cast(each, tf.float64)) for each in masks[0].outputs]
    return _weighed(engine.runtime, counts, gradients, loss)


def _weighed(runtime: TFRuntime, counts: list[Any], gradients: Any, loss: Any) -> tuple[Any, Any]:
    """Returns gradients, to be averaged over replicas, and the loss of this one."""
    own = tf.add_n(counts)
    whole = averaged(runtime, own)
    shares = [[tf.math.divide_no_nan(each, all_) for each in counts] for all_ in (own, whole)]

    def of_replicas(gradient: Any) -> Any:
        return None if gradient is None else StepOutput(gradient.outputs, shares[1])

    return [of_replicas(each) for each in gradients], StepOutput(loss.outputs, shares[0])
