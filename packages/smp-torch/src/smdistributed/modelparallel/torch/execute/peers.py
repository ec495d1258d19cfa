"""Whom this process blames when communication with other processes fails.

Everything of the library that communicates through torch does so inside ``Peers.blaming``: torch's
errors differ by backend and operation, and seldom say whose absence they are about.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from smdistributed.modelparallel.common.comm.presence import Presence, absent
from smdistributed.modelparallel.common.errors import CommError, SMPError
from smdistributed.modelparallel.common.failure import leave_for_exception
from smdistributed.modelparallel.common.names_of_ranks import have, listed
from smdistributed.modelparallel.common.whereabouts import Activity, Exchange

#: Global ranks that take part in an exchange.
Members = tuple[int, ...]
#: What is done with one other rank.
SENDING, RECEIVING = "sending to", "receiving from"
_OF_TWO = (SENDING, RECEIVING)
#: What gloo, NCCL and torch's store say when a process is gone or does not come.
_LOST = (
    *("Connection closed", "Connection reset", "Connection refused", "connection was", "closed by"),
    *("Broken pipe", "Timed out", "timed out", "imeout", "remote process", "ncclRemoteError"),
    *("aborted", "failed to connect", "Failed to recv", "Failed to send"),
)
#: Errors that mean what they say wherever they are raised.
_NOT_ABOUT_PEERS = (SMPError, torch.OutOfMemoryError)
#: A connection closes some milliseconds before the process that held it is gone.
_LOOK_SECONDS = 0.5
_TICK_SECONDS = 0.02
_WATCH_SECONDS = 0.5
_DONE_SECONDS = 3.0


class Peers:
    """The processes of the job, as this one sees them.

    Args:
        rank: global rank of this process.
        presences: of every process, by global rank.

    Attributes:
        entered: how often exchanges of each group were entered.
    """

    def __init__(self, rank: int, presences: Sequence[Presence]) -> None:
        self._rank = rank
        self._presences = presences
        self.entered: dict[Members, int] = {}
        self._inside: dict[Blaming, float] = {}

    def blaming(self, ranks: Sequence[int], doing: str) -> Blaming:
        """Inside, errors of torch become errors that name ranks.

        Args:
            ranks: global ranks that take part; this one may be among them.
            doing: what is done with them, as in "sending to".
        """
        return Blaming(self, tuple(ranks), doing)

    def inside(self) -> list[tuple[Blaming, float]]:
        """Returns the exchanges that this process is in, with their beginnings; for any thread."""
        return list(self._inside.items())

    def activities(self) -> list[Activity]:
        """Returns the exchanges that this process is in; for any thread."""
        return [
            Activity.since(since, each.words(), self._exchange_of(each))
            for each, since in self.inside()
        ]

    def _exchange_of(self, exchange: Blaming) -> Exchange:
        ranks = tuple(sorted({self._rank, *exchange.ranks}))
        if exchange.doing in _OF_TWO:
            return Exchange("tensors", ranks, sends=exchange.doing == SENDING)
        return Exchange(exchange.doing, ranks, self.entered.get(exchange.ranks, 0))

    def enter(self, exchange: Blaming) -> None:
        """Takes note that an exchange begins."""
        self.entered[exchange.ranks] = self.entered.get(exchange.ranks, 0) + 1
        self._inside[exchange] = time.monotonic()

    def leave(self, exchange: Blaming) -> None:
        """Takes note that an exchange is over, or has been started."""
        self._inside.pop(exchange, None)

    def are_there(self, ranks: Sequence[int]) -> bool:
        """Whether no process of ``ranks`` has ended, as far as this host can tell."""
        return not self._ended(ranks)

    @property
    def hosts(self) -> list[str]:
        """What names the host of each process; empty where that is unknown."""
        return [each.machine for each in self._presences]

    def explained(self, error: BaseException) -> CommError | None:
        """Returns what an error of torch's own says about the processes of the job, or None.

        For errors of communication that is not the library's.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, SMPError) or not _tells(error):
            return None
        return self.error_of(error, range(len(self._presences)), "communicating with")

    def error_of(self, error: RuntimeError, ranks: Sequence[int], doing: str) -> CommError:
        """Returns what an error of torch means, where communication with ``ranks`` raised it."""
        others = self.others(ranks)
        gone = self._absent(others)
        reason = reason_of(error)
        if gone:
            what = f"{listed(gone)} {have(gone)} ended"
            if set(gone.values()) == {"stopped"}:
                what = f"{listed(gone)} {have(gone)} stopped and did not take part in time"
        elif not _tells(error):
            return CommError(
                f"rank {self._rank}: {doing} {listed(others)} failed: {reason}. Every rank must "
                "make the same calls in the same order, with tensors of the same shapes and types.",
                rank=self._rank,
            )
        else:
            which = "that rank" if len(others) == 1 else "one of these"
            what = f"{which} has died or did not take part in time"
        return CommError(
            f"rank {self._rank}: {doing} {listed(others)} failed: {what} ({reason}). Look at its "
            "own output for the cause.",
            rank=self._rank,
            missing_ranks=list(gone or others),
        )

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Inside, the processes connect; one that ends meanwhile ends this one too.

        torch waits for it, for as long as a call may take, and cannot be interrupted.
        """
        everyone = range(len(self._presences))
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_WATCH_SECONDS):
                # Who is done may end soon after, so the others have a moment to be done as well.
                if self._ended(everyone) and not is_over.wait(_DONE_SECONDS):
                    error = RuntimeError("the connection cannot be made: aborted")
                    leave_for_exception(self._rank, self.error_of(error, everyone, "connecting to"))

        watcher = threading.Thread(target=watch, name="smp-connecting", daemon=True)
        watcher.start()
        try:
            with self.blaming(everyone, "connecting to"):
                yield
        finally:
            is_over.set()
            watcher.join()

    def departed(self, gone: Sequence[int], ranks: Sequence[int], doing: str) -> CommError:
        """Returns the error of an exchange without which ``gone`` have left the job."""
        others = self.others(ranks)
        return CommError(
            f"rank {self._rank}: {doing} {listed(others)} failed: {listed(gone)} "
            f"{have(gone)} ended without it. Every rank must make "
            "the same calls in the same order: give each the same number of batches.",
            rank=self._rank,
            missing_ranks=list(gone),
        )

    def without(self, failed: int, reason: str, ranks: Sequence[int], doing: str) -> CommError:
        """Returns the error of an exchange that cannot be, since a rank's step has failed."""
        others = self.others(ranks)
        return CommError(
            f"rank {self._rank}: {doing} {listed(others)} cannot complete: the step has failed on "
            f"rank {failed}: {reason}",
            rank=self._rank,
            missing_ranks=[failed],
        )

    def others(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of ``ranks`` that are not this process."""
        return [rank for rank in ranks if rank != self._rank]

    def _ended(self, ranks: Sequence[int]) -> bool:
        return "ended" in absent(self._presences, ranks).values()

    def _absent(self, ranks: Sequence[int]) -> dict[int, str]:
        deadline = time.monotonic() + _LOOK_SECONDS
        while not (found := absent(self._presences, ranks)) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        return dict(found)


class Blaming:
    """See ``Peers.blaming``. A class, since a step enters it for every transfer."""

    __slots__ = ("_peers", "doing", "ranks")

    def __init__(self, peers: Peers, ranks: Members, doing: str) -> None:
        self._peers = peers
        self.ranks = ranks
        self.doing = doing

    def words(self) -> str:
        """Returns what is done, and with whom."""
        return f"{self.doing} {listed(self._peers.others(self.ranks))}"

    def departed(self, gone: Sequence[int]) -> CommError:
        """See ``Peers.departed``."""
        return self._peers.departed(gone, self.ranks, self.doing)

    def without(self, failed: int, reason: str) -> CommError:
        """See ``Peers.without``."""
        return self._peers.without(failed, reason, self.ranks, self.doing)

    def __enter__(self) -> None:
        self._peers.enter(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._peers.leave(self)
        if isinstance(error, RuntimeError) and not isinstance(error, _NOT_ABOUT_PEERS):
            raise self._peers.error_of(error, self.ranks, self.doing) from error


def reason_of(error: BaseException) -> str:
    """Returns the first sentence of an error of torch, without the place in its sources."""
    line = next(iter(str(error).splitlines()), "")
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0] or type(error).__name__


def _tells(error: RuntimeError) -> bool:
    """Whether an error is about a process that is gone or does not come."""
    text = str(error)
    return any(mark in text for mark in _LOST)
