"""What this process waits for: transfers with each other process that have begun and not ended.

TensorFlow can end a transfer that takes too long by itself, but keeps a sleeping thread for each
until its time is over, also if it ended at once: after some hundred steps a process may have no
more threads. So transfers have no time-out of their own. Operations beside them count them, and
one thread of the library looks at the counts.
"""

from __future__ import annotations

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
        with tf.device("/CPU:0"):
            self._begun, self._ended = (
                tf.Variable(tf.zeros([size], tf.int64), trainable=False) for _ in range(2)
            )

    def counted(self, peers: Sequence[int], inputs: Sequence[Any], make: Callable[[], Any]) -> Any:
        """Adds a transfer that is counted to the present graph; eagerly it takes place at once.

        Args:
            peers: the other ranks that take part.
            inputs: tensors without which it does not begin.
            make: adds it; returns its operation, or its result.

        Returns:
            what ``make`` does.
        """
        with tf.control_dependencies(inputs):
            begun = self._count(self._begun, peers)
        with tf.control_dependencies([begun]):
            made = make()
        with tf.control_dependencies([made]):
            ended = self._count(self._ended, peers)
        if not tf.executing_eagerly():
            # Counts of several transfers are in no order, as the transfers are.
            graphs.keep(tf.compat.v1.get_default_graph(), [begun, ended])
        return made

    def num_ended(self) -> int:
        """Returns how many transfers have ended, counted once for each other rank in them."""
        return int(self._ended.numpy().sum())

    def awaited(self) -> list[int]:
        """Returns the ranks with which a transfer has begun that has not ended."""
        ended = self._ended.numpy()  # first, so that it is never the greater one
        return [int(rank) for rank in np.flatnonzero(self._begun.numpy() - ended)]

    def _count(self, counts: Any, peers: Sequence[int]) -> Any:
        value = np.zeros(self._size, np.int64)
        value[list(peers)] = 1
        with tf.device("/CPU:0"):
            return tf.raw_ops.AssignAddVariableOp(resource=counts.handle, value=value)
