"""What this process waits for: transfers with each other process that have begun and not ended.

TensorFlow can end a transfer that takes too long by itself, but keeps a sleeping thread for each
until its time is over, also if it ended at once: after some hundred steps a process may have no
more threads. So transfers have no time-out of their own. Operations beside them count them, and
one thread of the library looks at the counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import graphs


class Waits:
    """Counts the transfers of this process.

    Args:
        size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._begun, self._ended = (f"smp_{name}_{uuid.uuid4().hex}" for name in ("begun", "ended"))
        for name in (self._begun, self._ended):
            tf.raw_ops.AssignVariableOp(resource=self._counts(name), value=np.zeros(size, np.int64))

    def counted(self, peers: Sequence[int], inputs: Sequence[Any], make: Callable[[], Any]) -> Any:
        """Adds a transfer that is counted to the present graph; eagerly it takes place at once.

        Args:
            peers: the other ranks that take part.
            inputs: tensors without which it does not begin.
            make: adds it; returns its operation, or its result.

        Returns:
            what ``make`` does.
        """
        begun = self._count(self._begun, peers, inputs)
        made = make()
        ended = self._count(self._ended, peers, [made])
        if not tf.executing_eagerly():
            graphs.add_control_input(getattr(made, "op", made), begun)
            # Counts of several transfers are in no order, as the transfers are.
            graphs.keep(tf.compat.v1.get_default_graph(), [begun, ended])
        return made

    def num_ended(self) -> int:
        """Returns how many transfers have ended, counted once for each other rank in them."""
        return int(self._read(self._ended).sum())

    def awaited(self) -> list[int]:
        """Returns the ranks with which a transfer has begun that has not ended."""
        ended = self._read(self._ended)  # first, so that it is never the greater one
        return [int(rank) for rank in np.flatnonzero(self._read(self._begun) - ended)]

    def _count(self, name: str, peers: Sequence[int], after: Sequence[Any]) -> Any:
        value = np.zeros(self._size, np.int64)
        value[list(peers)] = 1
        counts, one_each = self._counts(name), tf.constant(value)
        # The operation itself: constants that wait for calls of functions keep loops from running.
        with tf.control_dependencies(after):
            return tf.raw_ops.AssignAddVariableOp(resource=counts, value=one_each)

    def _read(self, name: str) -> Any:
        return tf.raw_ops.ReadVariableOp(resource=self._counts(name), dtype=tf.int64).numpy()

    def _counts(self, name: str) -> Any:
        """Returns the variable of a name, for the present graph.

        Not as a ``tf.Variable``: gradients of loops know nothing of what only they capture.
        """
        with tf.device("/CPU:0"):
            return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[self._size], shared_name=name)
