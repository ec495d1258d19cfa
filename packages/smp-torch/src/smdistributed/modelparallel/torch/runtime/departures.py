"""Notices that a rank has left the job without an exchange that this one waits in.

A collective of torch fails when the connection to one of its ranks closes. A rank that ends in
order keeps its connections for those that still read what it sent, and says farewell: with how
often it has entered the exchanges of each group, so that the others need not wait for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping

from smdistributed.modelparallel.common.comm.transport import Transport
from smdistributed.modelparallel.common.failure import leave_for_exception
from smdistributed.modelparallel.torch.execute.peers import Blaming, Members, Peers

_TICK_SECONDS = 0.25
#: How long an exchange may take before anybody is asked for.
_OVERDUE_SECONDS = 0.5


class Departures:
    """A watch over the exchanges of this process, from ``start`` to ``stop``.

    Args:
        rank: global rank of this process.
        transport: on which ranks say farewell.
        peers: knows which exchanges this process has entered.
        end: ends this process by an error.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        peers: Peers,
        end: Callable[[int, BaseException], object] = leave_for_exception,
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._peers = peers
        self._end = end
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="smp-departures", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> bytes:
        """Ends the watch; returns what this rank says when it leaves."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        return last_words(self._peers.entered)

    def check(self) -> None:
        """Looks once."""
        overdue = [
            exchange
            for exchange, since in self._peers.inside()
            if self._rank in exchange.ranks and time.monotonic() > since + _OVERDUE_SECONDS
        ]
        if not overdue:
            return
        farewells = self._transport.farewells()
        for exchange in overdue:
            if gone := self._gone(exchange, farewells):
                self._end(self._rank, exchange.departed(gone))
                return

    def _gone(self, exchange: Blaming, farewells: Mapping[int, bytes]) -> list[int]:
        """Returns the ranks that have left without an exchange.

        Who has entered as many of its group has taken part: others may still be awaited there.
        """
        ours = self._peers.entered[exchange.ranks]
        return [
            rank
            for rank in exchange.ranks
            if rank in farewells and _entered(farewells[rank]).get(exchange.ranks, 0) < ours
        ]

    def _watch(self) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            self.check()


def last_words(entered: Mapping[Members, int]) -> bytes:
    """Returns how often exchanges were entered, as a rank says it when it leaves."""
    return json.dumps([[list(ranks), number] for ranks, number in entered.items()]).encode()


def _entered(words: bytes) -> dict[Members, int]:
    return {tuple(ranks): number for ranks, number in json.loads(words)}
