"""Notices a process that no longer answers, before transfers with it are given up.

While calls to a process that hangs are open, TensorFlow, told to end its transfers, crashes or
waits for ever now and then. So every process asks the next one, again and again, whether
it is there. A process answers from threads of its own, whatever it computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.failure import leave_for_exception
from smdistributed.modelparallel.tensorflow.compat import processes

_LONGEST_INTERVAL_SECONDS = 10.0
_ANSWER_SECONDS = 1.0
_TICK_SECONDS = 1.0


class Watch:
    """Watches the next process of the job, from ``start`` to ``stop``.

    A process that is silent for too long ends this one, with an error that names it.

    Args:
        rank: global rank of this process.
        size: number of processes, at least 2.
        timeout_seconds: how long the other may be silent.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._next = (rank + 1) % size
        self._timeout_seconds = timeout_seconds
        self._interval_seconds = min(timeout_seconds / 4, _LONGEST_INTERVAL_SECONDS)
        self._also: tuple[Callable[[], None], ...] = ()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-watch", daemon=True)

    @property
    def latest_seconds(self) -> float:
        """How long a process may be silent until it is noticed."""
        return self._timeout_seconds + self._interval_seconds + 2 * _ANSWER_SECONDS

    def start(self, *also: Callable[[], None]) -> None:
        """Begins; the other process's server must be up.

        Args:
            also: called every second, for what else is to be watched.
        """
        self._also = also
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        heard = asked = time.monotonic()
        while not self._has_ended.wait(min(self._interval_seconds, _TICK_SECONDS)):
            for check in self._also:
                check()
            if time.monotonic() < asked + self._interval_seconds:
                continue
            asked = time.monotonic()
            if not processes.silent_processes([self._next], _ANSWER_SECONDS):
                heard = time.monotonic()
            elif time.monotonic() - heard > self._timeout_seconds:
                error = CommError(
                    f"rank {self._next} did not answer in time (communication_timeout).",
                    rank=self._rank,
                    missing_ranks=[self._next],
                )
                leave_for_exception(self._rank, error)
