"""The cores that a process has, and TensorFlow's threads for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import processes

#: TensorFlow starts transfers in the threads that execute operations. If all of them are busy with
#: the next pass, what others wait for is sent after it, and the pipeline runs one rank at a time.
_FEWEST_THREADS = 4


class Cores(NamedTuple):
    """What a process may compute on.

    Attributes:
        host: of the process.
        numbers: of the cores there.
    """

    host: str
    numbers: frozenset[int]

    @classmethod
    def here(cls, host: str) -> Cores:
        """Returns those of this process."""
        return cls(host, frozenset(os.sched_getaffinity(0)))

    def number_each(self, every: Sequence[Cores]) -> int:
        """Returns how many cores there are for each process of this host, at least 1.

        Args:
            every: those of all processes, this one among them.
        """
        here = [each.numbers for each in every if each.host == self.host]
        return max(1, len(frozenset().union(*here)) // len(here))


def have_threads(num_processes: int) -> None:
    """Gives TensorFlow threads for transfers beside the one that computes.

    Args:
        num_processes: of this host.
    """
    cores = os.cpu_count() or 1
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    fewest = max(_FEWEST_THREADS, asked or cores)
    tf.config.threading.set_inter_op_parallelism_threads(fewest)
    if fewest * num_processes > cores:
        processes.let_idle_threads_sleep()


def has_one_device() -> bool:
    """Tells whether TensorFlow computes on the processor alone, as one device."""
    processors = tf.config.list_physical_devices("CPU")
    parts = [tf.config.get_logical_device_configuration(each) or [None] for each in processors]
    return not tf.config.get_visible_devices("GPU") and sum(map(len, parts)) == 1
