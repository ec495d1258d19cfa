"""Notices that a rank has left the job without a step that this one has begun.

A transfer that both sides know fails when one of them leaves. But where a graph runs for the first
time, TensorFlow's processes agree on its transfers with the first process, and one that never comes
there is waited for until the time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from smdistributed.modelparallel.common.comm.transport import FAREWELL_SECONDS, Transport
from smdistributed.modelparallel.tensorflow.compat import processes
from smdistributed.modelparallel.tensorflow.execute.links import has_ended


class Departures:
    """Ends transfers of this process that a rank takes no part in any more.

    Args:
        transport: on which ranks say farewell, with the number of steps that they have begun.
        peers: the other ranks of this process's pipeline, which begin the same steps.
        num_steps: returns how many steps this process has begun.
    """

    def __init__(
        self, transport: Transport, peers: Collection[int], num_steps: Callable[[], int]
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._num_steps = num_steps
        self._since: dict[int, float] = {}
        self._has_ended = False

    def check(self) -> None:
        """Looks once; to be called again and again, from any one thread."""
        if self._has_ended:
            return
        for rank, words in self._transport.farewells().items():
            if rank not in self._peers or self._num_steps() <= int(words):
                continue
            # What it has sent may still be on its way here.
            since = self._since.setdefault(rank, time.monotonic())
            if time.monotonic() > since + FAREWELL_SECONDS:
                self._has_ended = True
                processes.end_collectives(has_ended(rank))
                return


def last_words(num_steps: int) -> bytes:
    """Returns what a rank says when it leaves."""
    return str(num_steps).encode()
