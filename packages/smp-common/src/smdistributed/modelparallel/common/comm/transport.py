"""How bytes travel between the processes of a job.

A transport moves byte strings between global ranks over numbered channels; everything above it
(objects, groups, collectives) is written once, in ``communicator``. Messages of one sender on one
channel arrive in sending order. Sending ends when the receiver has the message.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from smdistributed.modelparallel.common.errors import ConfigError

#: How long an ending process keeps its data plane for peers that are still busy.
FAREWELL_SECONDS = 5.0


class PeersMissingError(Exception):
    """Some peers did not take part in an exchange.

    Attributes:
        missing_ranks: global ranks that did not.
        reason: what was seen, as a clause: "did not answer within 5 s", "have ended".
    """

    def __init__(self, missing_ranks: Sequence[int], reason: str) -> None:
        super().__init__(missing_ranks, reason)
        self.missing_ranks = tuple(missing_ranks)
        self.reason = reason


class Posted(Protocol):
    """A message that is being sent."""

    def wait(self, timeout_seconds: float) -> None:
        """Returns when all destinations have received it.

        Raises:
            PeersMissingError: some destination died or did not receive in time.
        """


class Transport(ABC):
    """A way between processes.

    Attributes:
        rank: global rank of this process.
        size: number of processes of the job.
        local_rank: rank among the processes of this host.
        local_size: number of processes on this host.
        is_one_machine: whether all processes share a machine, whatever its parts are called.
        hostname: name of this host.
        largest_alone: bytes of a message that arrives although its sender does not wait for it.
        awaited: ranks for which this process waits at present, as far as that is known; for any
            thread.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    is_one_machine: bool
    largest_alone: int
    awaited: Sequence[int] = ()

    def __init__(self) -> None:
        self.hostname = socket.gethostname()

    @abstractmethod
    def post(self, payload: bytes, destinations: Sequence[int], channel: int) -> Posted:
        """Starts sending one message to each destination; must be waited for."""

    @abstractmethod
    def receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        """Receives one message from each source; item i is that of ``sources[i]``.

        Raises:
            PeersMissingError: some source died or did not send in time.
        """

    def farewells(self) -> Mapping[int, bytes]:
        """Returns the last words of the ranks that have ended, as far as they have come here.

        Usable from any thread, until ``close``.
        """
        return {}

    @abstractmethod
    def report(self, words: bytes) -> None:
        """Tells all peers why this rank does not go on with what they may wait for; never waits.

        Args:
            words: for ``reports`` of the others; at most ``largest_alone`` bytes.
        """

    def reports(self) -> Mapping[int, bytes]:
        """Returns what ranks have reported, as far as it has come here; usable as ``farewells``.

        Of several that do at a time, one may be all that is known.
        """
        return {}

    @abstractmethod
    def close(self, release: Callable[[], None], last_words: bytes = b"") -> None:
        """Says farewell to all peers and ends.

        Args:
            release: frees the data plane. It is called once, when every rank has come here or
                ``FAREWELL_SECONDS`` after this one: late enough for peers that still read what
                this rank sent, soon enough for peers that wait for more and must learn that
                nothing will come.
            last_words: for ``farewells`` of the others.
        """


class SingleProcessTransport(Transport):
    """A world of one process."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    is_one_machine = True
    largest_alone = 0

    def post(self, payload: bytes, destinations: Sequence[int], channel: int) -> Posted:
        """See ``Transport.post``."""
        self._refuse(destinations)

    def receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        """See ``Transport.receive``."""
        self._refuse(sources)

    def report(self, words: bytes) -> None:
        """See ``Transport.report``; nobody waits."""

    def close(self, release: Callable[[], None], last_words: bytes = b"") -> None:
        """See ``Transport.close``."""
        release()

    def _refuse(self, ranks: Sequence[int]) -> NoReturn:
        raise AssertionError(f"a single process has no peers, yet ranks {list(ranks)} were asked")


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Tells whether an MPI launcher started this process.

    Asked instead of initialising MPI: a process alone, or under torchrun, must not touch it.
    """
    return any(name in environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_NAMESPACE"))


def started_by_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Tells whether torchrun, or a launcher that sets the same variables, started this process.

    Raises:
        ConfigError: it says so, but the variables cannot be those of a rank: a job would wait for
            ever for one that does not exist.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if started_by_mpi(environ) or not all(name in environ for name in needed):
        return False
    problems: list[str] = []
    size = _number(environ, "WORLD_SIZE", 1, None, problems)
    _number(environ, "RANK", 0, size, problems)
    _number(environ, "MASTER_PORT", 0, 1 << 16, problems)
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:
        local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size and size + 1, problems, size)
        _number(environ, "LOCAL_RANK", 0, local_size, problems, 0)
    if problems:
        raise ConfigError(
            " ".join(problems) + " Start the script with torchrun or smprun, which set them; or, "
            "for one process, unset RANK."
        )
    return True


def _number(
    environ: Mapping[str, str],
    name: str,
    lowest: int,
    end: int | None,
    problems: list[str],
    default: int | None = None,
) -> int | None:
    """Returns the value of a variable, or None if it is none from ``lowest`` to before ``end``."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        value = None
    if value is not None and value >= lowest and (end is None or value < end):
        return value
    bounds = f"of at least {lowest}" if end is None else f"from {lowest} to {end - 1}"
    problems.append(f"{name} must be an integer {bounds}; received {text!r}.")
    return None
