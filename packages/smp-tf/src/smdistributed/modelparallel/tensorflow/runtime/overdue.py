"""Notices transfers that a process which answers takes no part in: it computes, or sleeps."""

from __future__ import annotations

import time

from smdistributed.modelparallel.common.names_of_ranks import listed
from smdistributed.modelparallel.common.whereabouts import Activity
from smdistributed.modelparallel.tensorflow.compat import processes
from smdistributed.modelparallel.tensorflow.execute.links import waited_too_long
from smdistributed.modelparallel.tensorflow.execute.waits import Waits


class Overdue:
    """Ends the transfers of this process when it has waited too long for one.

    Args:
        rank: global rank of this process.
        waits: its transfers.
        timeout_seconds: how long it may wait while no transfer ends.
    """

    def __init__(self, rank: int, waits: Waits, timeout_seconds: float) -> None:
        self._rank = rank
        self._waits = waits
        self._timeout_seconds = timeout_seconds
        self._num_ended = 0
        self._since = time.monotonic()
        self._is_over = False

    def activities(self) -> list[Activity]:
        """Returns that this process waits for transfers, if it does; for any thread.

        Since when is known from the last look at them: they may have waited for longer.
        """
        num_ended, awaited = self._waits.num_ended(), self._waits.awaited()
        if not awaited:
            return []
        since = self._since if num_ended == self._num_ended else time.monotonic()
        return [Activity.since(since, f"transfers with {listed(awaited)}")]

    def check(self) -> None:
        """Looks once; to be called again and again, from any one thread."""
        if self._is_over:
            return
        num_ended, awaited = self._waits.num_ended(), self._waits.awaited()
        if num_ended != self._num_ended or not awaited:
            self._num_ended, self._since = num_ended, time.monotonic()
        elif time.monotonic() > self._since + self._timeout_seconds:
            self._is_over = True
            processes.end_collectives(waited_too_long(self._rank, awaited), is_late=True)
