"""Averages over the replicas of a model: ranks that hold the same partition.

With Horovod where the configuration asks for it, else with TensorFlow's own collectives.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.parameters.owners import is_absent
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


def averaged(runtime: TFRuntime, value: Any) -> Any:
    """Returns the mean of a tensor over the data-parallel group of this process.

    Usable eagerly and in a ``tf.function``; every rank of the group makes its calls in one order.

    Args:
        runtime: of this process.
        value: tensor, or ``tf.IndexedSlices``: the slices of all ranks, as one process has them
            of the whole batch. Optimizers treat slices otherwise than tensors.

    Shape: that of ``value``, the same on all ranks of the group; slices may differ in number.
    """
    members = runtime.topology.members(CommGroup.DP_GROUP, runtime.rank)
    if len(members) == 1 or is_absent(value):
        return value
    if runtime.config.horovod:
        import horovod.tensorflow as hvd

        return hvd.allreduce(value, op=hvd.Average)  # of slices, too
    if isinstance(value, tf.IndexedSlices):
        values, indices = (_gathered(runtime, each) for each in (value.values, value.indices))
        share = values / tf.cast(len(members), values.dtype)
        return tf.IndexedSlices(share, indices, value.dense_shape)
    tensor = tf.convert_to_tensor(value)
    total = runtime.links.all_reduce(tensor, CommGroup.DP_GROUP, members)
    return total / tf.cast(len(members), tensor.dtype)


def _gathered(runtime: TFRuntime, tensor: Any) -> Any:
    """Returns the tensors of the data-parallel group, one after the other.

    Shape: (rows, ...), where the number of rows may differ, to (sum of rows, ...).
    """
    members = runtime.topology.members(CommGroup.DP_GROUP, runtime.rank)
    place = members.index(runtime.rank)
    is_own = tf.one_hot(place, len(members), dtype=tf.int32)
    counts = runtime.links.all_reduce(is_own * tf.shape(tensor)[0], CommGroup.DP_GROUP, members)
    most = tf.reduce_max(counts)
    rest = tensor.shape.rank - 1
    padded = tf.pad(tensor, [[0, most - tf.shape(tensor)[0]], *([[0, 0]] * rest)])
    before, after = place * most, (len(members) - 1 - place) * most
    everyone = runtime.links.all_reduce(
        tf.pad(padded, [[before, after], *([[0, 0]] * rest)]), CommGroup.DP_GROUP, members
    )
    is_row = tf.reshape(tf.sequence_mask(counts, most), [-1])
    return tf.boolean_mask(everyone, is_row)


def begin_alike(runtime: TFRuntime, variables: Iterable[Any]) -> None:
    """Gives new variables of a model the initial values that the first replica has drawn.

    Values travel where they differ, as where the script sets no seed. State of other types, such as
    the seeds of layers, stays a replica's own. Eagerly. Collective: the data-parallel group, if
    there are such variables.
    """
    own = [each for each in variables if each.dtype.is_floating or each.dtype.is_complex]
    if runtime.topology.dp_size == 1 or not own:
        return
    digest = 0
    with unnoted():
        for each in own:
            digest = zlib.crc32(each.numpy().tobytes(), digest)
    if len(set(runtime.communicator.allgather(digest, CommGroup.DP_GROUP))) > 1:
        broadcast_from_first(runtime, own)


def broadcast_from_first(runtime: TFRuntime, variables: list[Any]) -> None:
    """Gives variables the values that the first rank of the data-parallel group has.

    Eagerly. Collective: the data-parallel group.
    """
    members = runtime.topology.members(CommGroup.DP_GROUP, runtime.rank)
    if len(members) == 1:
        return
    own = [each for each in map(keras.variable_of, variables) if not is_absent(each)]
    is_first = runtime.rank == members[0]
    with unnoted():
        values = [variable.numpy() for variable in own] if is_first else None
    everything = runtime.communicator.allgather(values, CommGroup.DP_GROUP)
    for variable, value in zip(own, everything[0], strict=True):
        if not is_first:
            variable.assign(value)
