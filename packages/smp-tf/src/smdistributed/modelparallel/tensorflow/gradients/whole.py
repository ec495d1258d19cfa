"""What can be said of a model's gradients only with those of all its partitions.

A process has the gradients of its own variables. Their norm, and whether any of them overflowed,
are the whole model's, so that all processes clip alike and skip the same updates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import keras, optimizers
from smdistributed.modelparallel.tensorflow.gradients.following import given_to_optimizers
from smdistributed.modelparallel.tensorflow.parameters.owners import note, owner_of
from smdistributed.modelparallel.tensorflow.parameters.variables import home_of
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


def in_optimizers(runtime: TFRuntime) -> AbstractContextManager[None]:
    """Within, Keras's optimizers clip and check the gradients of a whole model."""

    def norm(norm_of: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        if variables and all(home_of(variable) is None for variable in variables):
            return norm_of(gradients)
        # What is no model's is trained by every process, and counts once.
        is_first = runtime.coordinates.pp_rank == 0
        pairs = zip(gradients, variables, strict=True)
        own = [each for each, one in pairs if is_first or home_of(one) is not None]
        return _whole_norm(runtime, norm_of(own) if own else tf.zeros([]))

    def is_finite(own: Any) -> Any:
        return _over_partitions(runtime, 1.0 - tf.cast(own, tf.float32)) == 0.0

    def is_elsewhere(variable: Any) -> bool:
        return not runtime.guard.is_here(keras.variable_of(variable))

    def check(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        _refuse_in_body(runtime)
        _refuse_nothing(runtime, gradients, variables)
        _refuse_unplaced(runtime, variables)

    given = functools.partial(given_to_optimizers, runtime)
    return optimizers.whole_model(norm, is_finite, is_elsewhere, _note_slot, given, check)


def _note_slot(slot: Any, reference: Any) -> None:
    """Notes that a variable that an optimizer keeps lives where the one is that it is about."""
    home, owner = home_of(reference), owner_of(reference)
    if home is None or owner is None:
        return
    variable = keras.variable_of(slot)
    variable._smp_home = home
    # Processes may make their optimizers in other orders, so that others know it by no number.
    name = f"what an optimizer keeps of {owner.name}"
    own = replace(owner, variable=variable, number=None, name=name)
    for each in (slot, variable, variable.handle):
        note(each, own)


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
    """Raises if an update has no variables.

    Raises:
        _NothingToUpdateError: it has none.
    """
    if variables or runtime.topology.pp_size == 1:
        return
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
