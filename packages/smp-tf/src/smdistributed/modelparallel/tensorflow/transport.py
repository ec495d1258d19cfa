"""Tensors between two processes, inside graphs, by TensorFlow's own collectives.

RING over gRPC on CPUs, NCCL between GPUs: a broadcast in a group of two. Each transfer of a step
function has a key of its own, the same on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from smdistributed.modelparallel.common.errors import CommError, UnsupportedError

_CARRIED = (tf.bool, tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
#: What stands for a dtype that the collectives do not carry: of the same bits, or wide enough.
_BITS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}
_WIDER = {tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32}
_TASK = re.compile(r"/job:smp/(?:replica:0/)?task:(\d+)")
_NODE = re.compile(r"smp_(?:from|to)_rank_(\d+)")


#: TensorFlow keeps the shape of a collective by its key, so that a transfer whose shape is known in
#: the step only needs a key for each shape: it has this many, in a range of their own.
_KEYS_OF_SHAPES = 4096
_FIRST_OF_SHAPES = 1 << 28
#: Keys of sums are apart as well; ranks of one pipeline need not make as many.
_FIRST_SUM = 1 << 30


class Key(NamedTuple):
    """Names a transfer, the same on both sides.

    Attributes:
        number: of the tensor; of its shape where that is sent.
        of_shapes: first of the keys of the tensor, one of which its shape chooses; or None.
    """

    number: int
    of_shapes: int | None


class Transport:
    """Sends and receives of this process.

    Args:
        rank: global rank of this process.
        size: number of processes.
        timeout_seconds: how long a transfer waits.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._next_key = 0
        self._next_of_shapes = _FIRST_OF_SHAPES
        self._next_sum = 0

    def new_key(self, like: Any) -> Key:
        """Returns the key of a transfer of tensors like one. Every rank of a pipeline asks alike.

        Raises:
            UnsupportedError: not even the number of dimensions is known.
        """
        self._next_key += 1
        if like.shape.is_fully_defined():
            return Key(self._next_key, None)
        if like.shape.rank is None:
            raise UnsupportedError(
                f"{like.name} goes from one partition to another, but its number of dimensions is "
                "not known before the step: give it one with tf.ensure_shape, or keep its reader "
                "on the same partition."
            )
        self._next_of_shapes += _KEYS_OF_SHAPES
        return Key(self._next_key, self._next_of_shapes)

    def send(self, tensor: Any, target: int, key: Key) -> list[Any]:
        """Adds a send to the present graph; returns the operations that must run.

        A shape that is not known before the step goes first.
        """
        if key.of_shapes is None:
            return [self._send(_carried(tensor), target, key.number)]
        shape = tf.shape(tensor)
        return [
            self._send(shape, target, key.number),
            self._send(_carried(tensor), target, _chosen(key.of_shapes, shape)),
        ]

    def receive(self, like: Any, source: int, key: Key) -> Any:
        """Adds the receive of a tensor like one of another graph to the present graph."""
        dtype = _carrier(like.dtype)
        if key.of_shapes is None:
            shape = tf.constant(like.shape.as_list(), tf.int32)
            received = self._receive(shape, dtype, source, key.number)
        else:
            rank = like.shape.rank
            shape = self._receive(tf.constant([rank], tf.int32), tf.int32, source, key.number)
            shape.set_shape([rank])
            received = self._receive(shape, dtype, source, _chosen(key.of_shapes, shape))
        received.set_shape(like.shape)
        return _restored(received, like.dtype)

    def all_reduce(self, tensor: Any, members: Sequence[int]) -> Any:
        """Adds the sum of a tensor over some ranks, all of which do the same, to the graph.

        Eagerly it is computed at once.
        """
        key = self._size * (self._size + 1) + min(members) * self._size + len(members)
        self._next_sum += 1
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=len(members),
            group_key=key,
            instance_key=_FIRST_SUM + self._next_sum,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            timeout_seconds=self._timeout_seconds,
            name="smp_sum",
        )

    def _send(self, tensor: Any, target: int, key: Any) -> Any:
        return tf.raw_ops.CollectiveBcastSendV2(
            input=tensor,
            group_size=2,
            group_key=self._group(target),
            instance_key=key,
            timeout_seconds=self._timeout_seconds,
            name=f"smp_to_rank_{target}",
        ).op

    def _receive(self, shape: Any, dtype: Any, source: int, key: Any) -> Any:
        return tf.raw_ops.CollectiveBcastRecvV2(
            T=dtype,
            group_size=2,
            group_key=self._group(source),
            instance_key=key,
            shape=shape,
            timeout_seconds=self._timeout_seconds,
            name=f"smp_from_rank_{source}",
        )

    def _group(self, peer: int) -> int:
        return 1 + min(self._rank, peer) * self._size + max(self._rank, peer)


def _chosen(first: int, shape: Any) -> Any:
    """Returns the key for a shape, out of those of a transfer."""
    place = tf.constant(0)
    for length in tf.unstack(shape):
        place = (place * 31 + length) % _KEYS_OF_SHAPES
    return first + place


def _carrier(dtype: Any) -> Any:
    if dtype in _CARRIED:
        return dtype
    carrier = _BITS.get(dtype) or _WIDER.get(dtype)
    if carrier is None:
        raise UnsupportedError(
            f"tensors of {dtype.name} cannot go from one partition to another: keep the operations "
            "that make and read it on one partition (smp.partition), or cast it."
        )
    return carrier


def _carried(tensor: Any) -> Any:
    carrier = _carrier(tensor.dtype)
    if carrier == tensor.dtype:
        return tensor
    return tf.bitcast(tensor, carrier) if tensor.dtype in _BITS else tf.cast(tensor, carrier)


def _restored(tensor: Any, dtype: Any) -> Any:
    if tensor.dtype == dtype:
        return tensor
    return tf.bitcast(tensor, dtype) if dtype in _BITS else tf.cast(tensor, dtype)


def explained(error: BaseException, rank: int) -> CommError | None:
    """Returns what an error of TensorFlow says of other processes; None if it says nothing.

    Args:
        error: any error.
        rank: of this process.
    """
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.DeadlineExceededError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.InternalError,
    )
    if not isinstance(error, kinds):
        return None
    text = str(error)
    found = [*_NODE.findall(text), *_TASK.findall(text)]
    peers = sorted({int(each) for each in found} - {rank})
    if not peers:
        return None
    late = isinstance(error, tf.errors.DeadlineExceededError)
    what = "did not answer in time (communication_timeout)" if late else "has ended"
    ranks = ", ".join(map(str, peers))
    return CommError(
        f"a transfer of rank {rank} failed: rank {ranks} {what}.", rank=rank, missing_ranks=peers
    )
