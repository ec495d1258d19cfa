"""What can be said of a model's gradients only with those of all its partitions.

A process has the gradients of its own variables. Their norm, and whether any of them overflowed,
are the whole model's, so that all processes clip alike and skip the same updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import keras, optimizers
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.parameters.variables import home_of
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


def clip_by_global_norm(
    runtime: TFRuntime, gradients: Sequence[Any], clip_norm: Any
) -> tuple[list[Any], Any]:
    """Returns gradients of this process, scaled as one process would do it, and their norm.

    Args:
        runtime: of this process.
        gradients: tensors, ``tf.IndexedSlices`` or None.
        clip_norm: greatest norm of the gradients of all partitions together.
    """
    present = [each for each in gradients if each is not None]
    with unnoted():
        own = tf.linalg.global_norm(present) if present else tf.zeros([])
        norm = _whole_norm(runtime, own)
    clipped, _ = tf.clip_by_global_norm(list(gradients), clip_norm, use_norm=norm)
    return clipped, norm


def in_optimizers(runtime: TFRuntime) -> AbstractContextManager[None]:
    """Within, Keras's optimizers clip and check the gradients of a whole model."""

    def norm(own: Any, variables: Sequence[Any]) -> Any:
        if not variables or any(home_of(variable) is not None for variable in variables):
            return _whole_norm(runtime, own)
        return own

    def is_finite(own: Any) -> Any:
        return _over_partitions(runtime, 1.0 - tf.cast(own, tf.float32)) == 0.0

    def has_others(variables: Sequence[Any]) -> bool:
        if runtime.topology.pp_size == 1:
            return False
        return not variables or any(home_of(variable) is not None for variable in variables)

    def check(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        _refuse_in_body(runtime)
        _refuse_nothing(runtime, gradients, variables)
        _refuse_unplaced(runtime, variables)

    return optimizers.whole_model(norm, is_finite, has_others, check)


def _refuse_in_body(runtime: TFRuntime) -> None:
    """Raises if an optimizer updates once for each microbatch, where one process does for a batch.

    Raises:
        UnsupportedError: it does.
    """
    microbatches = runtime.config.microbatches
    if runtime.current_step is not None and microbatches > 1:
        raise UnsupportedError(
            "an optimizer updates after a step function, by what accumulate() makes of gradients; "
            f"received an update inside of one, which would be made {microbatches} times a batch, "
            "once for each microbatch: return the gradients, and update outside."
        )


class _NothingToUpdateError(SMPError, ValueError):
    """An update of no variables; a ``ValueError`` as that of Keras."""


def _refuse_nothing(runtime: TFRuntime, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises if an update has no variables, and not because other processes alone have gradients.

    Raises:
        _NothingToUpdateError: it has none.
    """
    if variables or runtime.topology.pp_size == 1:
        return
    if gradients or not runtime.has_asked_in_vain:
        raise _NothingToUpdateError(
            f"an update needs the variables that it is of; received {len(gradients)} gradients and "
            "no variables, as where a script keeps what a model had before its first call: ask for "
            "model.trainable_variables after the first call of a step function, and build "
            "optimizers then."
        )


def _refuse_unplaced(runtime: TFRuntime, variables: Sequence[Any]) -> None:
    """Raises if variables are updated of a model that no step function has called.

    Raises:
        NotPartitionedError: they are.
    """
    if runtime.topology.pp_size == 1:
        return
    updated = {id(keras.variable_of(variable)) for variable in variables}
    for engine in list(runtime.engines):
        if engine.is_partitioned:
            continue
        if any(id(each) in updated for each in keras.variables_made(engine.model)):
            raise NotPartitionedError(
                f"the DistributedModel {engine.name} is trained by calling it in a step function, "
                "which spreads it over the processes; received an update of variables of it that "
                "no step function has placed, as where layers of it are called by themselves: "
                "every process would train the whole model. Call the model in a function "
                "decorated with @smp.step (in a train_step, too), and layers in its call."
            )


def _whole_norm(runtime: TFRuntime, own: Any) -> Any:
    """Returns the norm of the gradients of all partitions, given that of this process's.

    Squares go in double precision: a process without gradients does not know what others have.
    """
    square = _over_partitions(runtime, tf.square(tf.cast(own, tf.float64)))
    return tf.cast(tf.sqrt(square), own.dtype)


def _over_partitions(runtime: TFRuntime, value: Any) -> Any:
    """Returns a sum over the partitions of this process's pipeline. Collective: the pipeline."""
    if runtime.topology.pp_size == 1:
        return value
    return runtime.links.all_reduce(value, CommGroup.PP_GROUP, runtime.pipeline_ranks)
