"""Tensors between two processes, inside graphs, by TensorFlow's own collectives.

From the memory of the host over gRPC, a broadcast in a group of two; where both are on one host,
what is large goes through a mailbox, and only its place so. From GPU to GPU by NCCL, which
carries floating-point numbers: a sum with zeros, because TensorFlow lets a receiving broadcast
write to memory that kernels started earlier may still use. Each transfer of a step function has a
key of its own, the same on both sides. NCCL knows no keys: it pairs what the two sides start in one
order, one at a time, so that operations on GPUs are put in an order by ``in_order``.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from smdistributed.modelparallel.common.errors import CommError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.names_of_ranks import have, listed
from smdistributed.modelparallel.tensorflow.compat import graphs, processes
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.execute.lengths import (
    LENGTHS,
    emptied,
    filled,
    next_length,
)
from smdistributed.modelparallel.tensorflow.execute.mailboxes import Mailboxes
from smdistributed.modelparallel.tensorflow.execute.waits import Waits

_CARRIED = (tf.bool, tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
#: What goes from GPU to GPU; integers live in the memory of the host, mostly.
_BY_NCCL = (tf.float32, tf.float16, tf.float64)
#: What stands for a dtype that the collectives do not carry: of the same bits, or wide enough.
_CARRIERS = {
    tf.bfloat16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
}
_TASK = re.compile(r"/job:smp/(?:replica:0/)?task:(\d+)")
#: Operations that wait for other processes.
_WAITING = ("CollectiveBcastRecvV2", "CollectiveReduceV2")
#: A process that works answers at once, whatever it executes.
_HEALTH_SECONDS = 2.0
_NODE = re.compile(r"smp_(?:from|to)_rank_(\d+)")
_ENDED = re.compile(r"smp: rank (\d+) has left the job")
_LATE = re.compile(r"smp: rank (\d+) has waited too long for rank ([\d, ]+)")


_FIRST_OF_LENGTHS = 1 << 28
#: What Python costs at both ends of a mailbox, TensorFlow takes for copies of about half of that.
#: Where a shape is sent, a mailbox spares a message, whatever the size.
_LAID_BYTES = 1 << 21
#: Keys of sums are apart as well, those of each kind of group in a range of their own.
_FIRST_SUM = 1 << 30
_KEYS_OF_SUMS = 1 << 26


class Key(NamedTuple):
    """Names a transfer, the same on both sides.

    Attributes:
        number: of the tensor; of its shape, or its place, where that is sent.
        of_lengths: first of the keys of the tensor, one of which its length chooses; or None.
        is_laid: goes through a mailbox where the receiver reads that of the sender.
    """

    number: int
    of_lengths: int | None
    is_laid: bool


class Links:
    """Sends and receives of this process.

    Args:
        rank: global rank of this process.
        size: number of processes.
        has_gpu: every process has one.
        mailboxes: of this process and those that it exchanges tensors with.

    Attributes:
        waits: counts them.
        mailboxes: as given.
    """

    def __init__(self, rank: int, size: int, has_gpu: bool, mailboxes: Mailboxes) -> None:
        self.waits = Waits(size)
        self._rank = rank
        self._size = size
        self._has_gpu = has_gpu
        self.mailboxes = mailboxes
        self._newest: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._next_key = 0
        self._next_of_lengths = _FIRST_OF_LENGTHS
        self._num_sums: Counter[CommGroup] = Counter()

    def new_key(self, like: Any) -> Key:
        """Returns the key of a transfer of tensors like one. Every rank of a pipeline asks alike.

        Raises:
            UnsupportedError: not even the number of dimensions is known.
        """
        self._next_key += 1
        if like.shape.is_fully_defined():
            num_bytes = like.shape.num_elements() * like.dtype.size
            return Key(self._next_key, None, num_bytes >= _LAID_BYTES)
        if like.shape.rank is None:
            raise UnsupportedError(
                f"{like.name} goes from one partition to another, but its number of dimensions is "
                "not known before the step: give it one with tf.ensure_shape, or keep its reader "
                "on the same partition."
            )
        self._next_of_lengths += len(LENGTHS)
        return Key(self._next_key, self._next_of_lengths, is_laid=True)

    @property
    def has_order(self) -> bool:
        """Whether there are transfers that must be given to ``in_order``."""
        return self._has_gpu

    def needs_order(self, like: Any) -> bool:
        """Tells whether transfers of tensors like one must be given to ``in_order``."""
        return self._by_nccl(self._carrier(like.dtype))

    def in_order(self, operations: Sequence[Any]) -> None:
        """Lets operations of the present graph start one after the other, after all before.

        All processes must do that in a consistent order.
        """
        graph = tf.compat.v1.get_default_graph()
        for operation in operations:
            earlier = self._newest.get(graph)
            if earlier is not None:
                graphs.add_control_input(operation, earlier)
            self._newest[graph] = operation

    def begin_after(self, checks: Sequence[Any], operations: Sequence[Any]) -> None:
        """Lets those operations that wait for other processes begin after some tensors or checks.

        One that waits when a check fails may go on doing so until its time is up.
        """
        for operation in operations:
            if operation.type in _WAITING:
                for check in checks:
                    graphs.add_control_input(operation, getattr(check, "op", check))

    def send(self, tensor: Any, target: int, key: Key) -> list[Any]:
        """Adds a send to the present graph; returns the operations, of which the last one sends.

        Shape: any of a known number of dimensions. One that is not known before the step goes
            first, as int32 of (dimensions,), unless it goes through a mailbox.
        """
        if self._is_laid(key, tensor.dtype) and self.mailboxes.is_read_by(target):
            return [self._send(self._laid(self._carried(tensor)), target, key.number)]
        if key.of_lengths is None:
            return [self._send(self._carried(tensor), target, key.number)]
        flat, place = filled(self._carried(tensor))
        return [
            self._send(tf.shape(tensor), target, key.number),
            self._send(flat, target, key.of_lengths + place),
        ]

    def receive(self, like: Any, source: int, key: Key) -> tuple[Any, Any]:
        """Adds the receive of a tensor like one of another graph to the present graph.

        Shape: that of ``like``; lengths that are not known before the step are received first.

        Returns:
            the tensor, and the operation that receives it.
        """
        dtype = self._carrier(like.dtype)
        if self._is_laid(key, like.dtype) and self.mailboxes.reads(source):
            shape = tf.constant([1 + like.shape.rank], tf.int32)
            received = self._taken(
                self._receive(shape, tf.int64, source, key.number), dtype, source
            )
            operation = received.op
        elif key.of_lengths is None:
            shape = tf.constant(like.shape.as_list(), tf.int32)
            received = self._receive(shape, dtype, source, key.number)
            operation = received.op
        else:
            rank = like.shape.rank
            shape = self._receive(tf.constant([rank], tf.int32), tf.int32, source, key.number)
            shape.set_shape([rank])
            length, place = next_length(tf.reduce_prod(shape))
            flat = self._receive(length[tf.newaxis], dtype, source, key.of_lengths + place)
            operation = flat.op
            received = emptied(flat, shape)
        received.set_shape(like.shape)
        return _as_dtype(received, like.dtype), operation

    def all_reduce(self, tensor: Any, kind: CommGroup, members: Sequence[int]) -> Any:
        """Adds the sum of a tensor over a group of ranks, all of which do the same, to the graph.

        Eagerly it is computed at once.

        Shape: that of ``tensor``.

        Args:
            tensor: of one shape and dtype on all members.
            kind: of the group. Members make as many sums of a kind; other ranks may make more.
            members: of the group, this rank among them.
        """
        place = list(CommGroup).index(kind)
        group = self._size * (self._size + 1 + place) + min(members)
        key = _FIRST_SUM + place * _KEYS_OF_SUMS + self._num_sums[kind]
        others = [member for member in members if member != self._rank]

        def summed(flat: Any, key: Any) -> Any:
            return self.waits.counted(
                others, [flat], lambda: self._sum(flat, len(members), group, key)
            )

        if tensor.shape.is_fully_defined():
            self._num_sums[kind] += 1
            sums = total = summed(tensor, key)
        else:
            self._num_sums[kind] += len(LENGTHS)
            flat, length = filled(tensor)
            sums = summed(flat, key + length)
            total = emptied(sums, tf.shape(tensor))
            total.set_shape(tensor.shape)
        if not tf.executing_eagerly() and self.needs_order(tensor):
            self.in_order([sums.op])
        return total

    def _send(self, tensor: Any, target: int, key: Any) -> Any:
        def send() -> Any:
            name = f"smp_to_rank_{target}"
            if self._by_nccl(tensor.dtype):
                return self._sum(tensor, 2, self._pair(target), key, name).op
            with tf.device("/CPU:0"):
                return tf.raw_ops.CollectiveBcastSendV2(
                    input=tensor,
                    group_size=2,
                    group_key=2 * self._pair(target),
                    instance_key=key,
                    name=name,
                ).op

        return self.waits.counted([target], [tensor], send)

    def _receive(self, shape: Any, dtype: Any, source: int, key: Any) -> Any:
        def receive() -> Any:
            name = f"smp_from_rank_{source}"
            if self._by_nccl(dtype):
                return self._sum(tf.zeros(shape, dtype), 2, self._pair(source), key, name)
            with tf.device("/CPU:0"):
                return tf.raw_ops.CollectiveBcastRecvV2(
                    T=dtype,
                    group_size=2,
                    group_key=2 * self._pair(source),
                    instance_key=key,
                    shape=shape,
                    name=name,
                )

        return self.waits.counted([source], [shape], receive)

    def _is_laid(self, key: Key, dtype: Any) -> bool:
        return key.is_laid and not self._by_nccl(self._carrier(dtype))

    def _laid(self, tensor: Any) -> Any:
        """Returns what the receiver is to know, once a tensor lies in the mailbox."""
        return _by_python(self.mailboxes.lay, tensor, tf.int64)

    def _taken(self, known: Any, dtype: Any, source: int) -> Any:
        take = functools.partial(self.mailboxes.take, source, dtype=dtype.as_numpy_dtype)
        return _by_python(take, known, dtype)

    def _sum(self, tensor: Any, size: int, group: int, key: Any, name: str = "smp_sum") -> Any:
        is_on_gpu = self._by_nccl(tensor.dtype)
        with tf.device("/GPU:0" if is_on_gpu else "/CPU:0"):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                group_size=size,
                group_key=2 * group + is_on_gpu,  # the members of a group are of one kind
                instance_key=key,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                name=name,
            )

    def _by_nccl(self, dtype: Any) -> bool:
        return self._has_gpu and dtype in _BY_NCCL

    def _carrier(self, dtype: Any) -> Any:
        if dtype in _CARRIED:
            return dtype
        if self._has_gpu and dtype == tf.bfloat16:
            return tf.float32  # a sum as float16 would change some bits
        if dtype not in _CARRIERS:
            raise UnsupportedError(
                f"tensors of {dtype.name} cannot go from one partition to another: keep the "
                "operations that make and read it on one partition (smp.partition), or cast it."
            )
        return _CARRIERS[dtype]

    def _carried(self, tensor: Any) -> Any:
        return _as_dtype(tensor, self._carrier(tensor.dtype))

    def _pair(self, peer: int) -> int:
        return 1 + min(self._rank, peer) * self._size + max(self._rank, peer)


def _by_python(function: Callable[[Any], Any], tensor: Any, dtype: Any) -> Any:
    """Returns what a function makes of an array, in no order with other Python of the graph."""
    with unnoted(), tf.device("/CPU:0"):
        made = tf.numpy_function(function, [tensor], dtype)
    graphs.keep(made.graph, [made.op])
    return made


def _as_dtype(tensor: Any, dtype: Any) -> Any:
    """Returns a tensor as one of another dtype: of the same bits, or of another size."""
    if tensor.dtype == dtype:
        return tensor
    return tf.bitcast(tensor, dtype) if tensor.dtype.size == dtype.size else tf.cast(tensor, dtype)


def has_ended(rank: int) -> str:
    """Returns the message by which others learn that a rank takes part in no transfer any more."""
    return f"smp: rank {rank} has left the job, with its side of all transfers."


def waited_too_long(rank: int, awaited: Sequence[int]) -> str:
    """Returns the message by which others learn why a rank takes part in no transfer any more."""
    return (
        f"smp: rank {rank} has waited too long for rank {', '.join(map(str, awaited))} "
        "(communication_timeout)."
    )


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
    late = _LATE.search(text)
    if late:
        awaited = [int(each) for each in late[2].split(", ")]
        return _explained_wait(int(late[1]), awaited, rank, size)
    # Who left is known to those as well whose transfers failed because of others'.
    found = _ENDED.findall(text) or [*_NODE.findall(text), *_TASK.findall(text)]
    peers = sorted({int(each) for each in found} - {rank})
    if not peers:
        return None
    if isinstance(error, tf.errors.CancelledError) and processes.is_consequence(error):
        return CommError(
            f"an operation of rank {rank} failed in a step, but TensorFlow gives the error of a "
            "transfer that it cancelled for that: see its messages above, which "
            "TF_CPP_MIN_LOG_LEVEL=1 shows.",
            rank=rank,
        )
    return CommError(
        f"a transfer of rank {rank} failed: {listed(peers)} {have(peers)} ended.",
        rank=rank,
        missing_ranks=peers,
    )


def _explained_wait(waiting: int, awaited: list[int], rank: int, size: int) -> CommError:
    """Returns the error of a rank whose transfers fail since one has waited too long for others."""
    others = [each for each in range(size) if each != rank]
    # Those that wait for a silent process are waited for, too.
    peers = processes.silent_processes(others, _HEALTH_SECONDS) or awaited
    if rank in peers:
        return CommError(
            f"transfers of rank {rank} failed: it did not come to one with rank {waiting} in time "
            "(communication_timeout).",
            rank=rank,
        )
    return CommError(
        f"a transfer of rank {rank} failed: {listed(sorted(peers))} did not answer in time "
        "(communication_timeout).",
        rank=rank,
        missing_ranks=peers,
    )
