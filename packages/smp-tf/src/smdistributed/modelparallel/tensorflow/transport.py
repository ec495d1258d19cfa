"""Tensors between two processes, inside graphs, by TensorFlow's own collectives.

RING over gRPC on CPUs, NCCL between GPUs: a broadcast in a group of two. Each transfer of a step
function has a key of its own, the same on both sides.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import CommError, UnsupportedError
from smdistributed.modelparallel.tensorflow import compat

_CARRIED = (tf.bool, tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
#: What stands for a dtype that the collectives do not carry: of the same bits, or wide enough.
_BITS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}
_WIDER = {tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32}
_TASK = re.compile(r"/job:smp/(?:replica:0/)?task:(\d+)")
#: A process that works answers at once, whatever it executes.
_HEALTH_SECONDS = 2.0
_NODE = re.compile(r"smp_(?:from|to)_rank_(\d+)")


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
        self._next_key = 1

    def new_keys(self, count: int) -> int:
        """Returns the first of ``count`` new keys. Every rank of a pipeline asks alike."""
        first = self._next_key
        self._next_key += count
        return first

    def send(self, tensor: Any, target: int, key: int) -> list[Any]:
        """Adds a send to the present graph; returns the operations that must run.

        A shape that is not known before the step goes first, with the next key.
        """
        made = []
        if not tensor.shape.is_fully_defined():
            if tensor.shape.rank is None:
                raise UnsupportedError(
                    f"a tensor that goes from rank {self._rank} to rank {target} has a number of "
                    f"dimensions that is not known before the step: {tensor}. Give it one with "
                    "tf.ensure_shape, or keep its reader on the same partition."
                )
            made.append(self._send(tf.shape(tensor), target, key + 1))
        made.append(self._send(_carried(tensor), target, key))
        return made

    def receive(self, like: Any, source: int, key: int) -> Any:
        """Adds the receive of a tensor like one of another graph to the present graph."""
        shape = like.shape
        if shape.is_fully_defined():
            length = tf.constant(shape.as_list(), tf.int32)
        else:
            rank = tf.constant([shape.rank], tf.int32)
            length = self._receive(rank, tf.int32, source, key + 1)
            length.set_shape([shape.rank])
        dtype = _carrier(like.dtype)
        received = self._receive(length, dtype, source, key)
        received.set_shape(shape)
        return _restored(received, like.dtype)

    def _send(self, tensor: Any, target: int, key: int) -> Any:
        return tf.raw_ops.CollectiveBcastSendV2(
            input=tensor,
            group_size=2,
            group_key=self._group(target),
            instance_key=key,
            timeout_seconds=self._timeout_seconds,
            name=f"smp_to_rank_{target}",
        ).op

    def _receive(self, shape: Any, dtype: Any, source: int, key: int) -> Any:
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


def explained(error: BaseException, rank: int, size: int) -> CommError | None:
    """Returns what an error of TensorFlow says of other processes; None if it says nothing.

    Args:
        error: any error.
        rank: of this process.
        size: number of processes.
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
    if isinstance(error, tf.errors.CancelledError) and compat.is_consequence(error):
        return CommError(
            f"an operation of rank {rank} failed in a step, but TensorFlow gives the error of a "
            "transfer that it cancelled for that: see its messages above, which "
            "TF_CPP_MIN_LOG_LEVEL=1 shows.",
            rank=rank,
        )
    what = "has ended"
    if isinstance(error, tf.errors.DeadlineExceededError):
        what = "did not answer in time (communication_timeout)"
        # Those that wait for a silent process are waited for, too, and whose time is up first is
        # chance.
        others = [each for each in range(size) if each != rank]
        peers = compat.silent_processes(others, _HEALTH_SECONDS) or peers
    ranks = ", ".join(map(str, peers))
    return CommError(
        f"a transfer of rank {rank} failed: rank {ranks} {what}.", rank=rank, missing_ranks=peers
    )
