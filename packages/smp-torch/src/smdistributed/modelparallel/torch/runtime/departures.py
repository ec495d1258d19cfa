"""Notices that a rank will not take part in an exchange that this one waits in.

A collective of torch fails when the connection to one of its ranks closes. A rank that ends in
order keeps its connections for those that still read what it sent, and says farewell: with how
often it has entered the exchanges of each group, so that the others need not wait for it. A rank
whose part of a pipeline's step fails reports why: its script may go on, but the step cannot.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping

from smdistributed.modelparallel.common.comm.transport import Transport
from smdistributed.modelparallel.common.errors import CommError, SMPError
from smdistributed.modelparallel.common.failure import leave_for_exception
from smdistributed.modelparallel.torch.execute.peers import Blaming, Members, Peers

_TICK_SECONDS = 0.25
#: How long an exchange may take before anybody is asked for.
_OVERDUE_SECONDS = 0.5
#: Of what a report says; its beginning and its end are kept.
_MOST_CHARACTERS = 1200


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
        #: Why a step has failed here while others computed theirs; "" if none has.
        self._failed = ""
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

    def report(self, error: BaseException) -> None:
        """Has others learn why this rank's part of a step has failed, if not because of them."""
        self._failed = _shortened(f"{type(error).__name__}: {error}")
        if not isinstance(error, CommError):
            self._transport.report(self._failed.encode())

    def check_intact(self) -> None:
        """Raises unless this rank has done its part of all steps.

        Raises:
            SMPError: it has not, so what others have sent it is still on its way.
        """
        if self._failed:
            raise SMPError(
                f"rank {self._rank} has failed within a step, while the other partitions computed "
                "theirs, and no step can follow. Mend the cause and start the job again; received "
                f"then: {self._failed}"
            )

    def check(self) -> None:
        """Looks once."""
        overdue = [
            exchange
            for exchange, since in self._peers.inside()
            if time.monotonic() > since + _OVERDUE_SECONDS
        ]
        if not overdue:
            return
        for rank, words in self._transport.reports().items():
            self._end(self._rank, overdue[0].without(rank, words.decode()))
            return
        together = [exchange for exchange in overdue if self._rank in exchange.ranks]
        farewells = self._transport.farewells() if together else {}
        for exchange in together:
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


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def last_words(entered: Mapping[Members, int]) -> bytes:
    """Returns how often exchanges were entered, as a rank says it when it leaves."""
    return json.dumps([[list(ranks), number] for ranks, number in entered.items()]).encode()


def _entered(words: bytes) -> dict[Members, int]:
    return {tuple(ranks): number for ranks, number in json.loads(words)}
