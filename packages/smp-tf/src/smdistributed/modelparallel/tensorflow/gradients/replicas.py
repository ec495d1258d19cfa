"""Averages over the replicas of a model: ranks that hold the same partition.

With Horovod where the configuration asks for it, else with TensorFlow's own collectives.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


def averaged(runtime: TFRuntime, value: Any) -> Any:
    """Returns the mean of a tensor over the data-parallel group of this process.

    Usable eagerly and in a ``tf.function``; every rank of the group makes its calls in one order.

    Args:
        runtime: of this process.
        value: tensor, or ``tf.IndexedSlices``, which become dense.

    Shape: that of ``value``, the same on all ranks of the group.
    """
    members = runtime.topology.members(CommGroup.DP_GROUP, runtime.rank)
    if len(members) == 1:
        return value
    tensor = tf.convert_to_tensor(value)
    if runtime.config.horovod:
        import horovod.tensorflow as hvd

        return hvd.allreduce(tensor, op=hvd.Average)
    total = runtime.links.all_reduce(tensor, CommGroup.DP_GROUP, members)
    return total / tf.cast(len(members), tensor.dtype)


def broadcast_from_first(runtime: TFRuntime, variables: list[Any]) -> None:
    """Gives variables the values that the first rank of the data-parallel group has.

    Eagerly. Collective: the data-parallel group.
    """
    members = runtime.topology.members(CommGroup.DP_GROUP, runtime.rank)
    if len(members) == 1:
        return
    own = [keras.variable_of(variable) for variable in variables]
    is_first = runtime.rank == members[0]
    values = [variable.numpy() for variable in own] if is_first else None
    everything = runtime.communicator.allgather(values, CommGroup.DP_GROUP)
    for variable, value in zip(own, everything[0], strict=True):
        if not is_first:
            variable.assign(value)
