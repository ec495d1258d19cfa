"""The transport over MPI (mpi4py; Open MPI comes from its wheel).

MPI has no time-outs, and a call that blocks inside the library can neither be interrupted nor
learn that a peer has gone. So every wait here polls: matched probes and non-blocking requests,
against a deadline. Polling yields the processor at once and begins to sleep only after a moment,
which keeps a round trip at some microseconds. The longer a wait lasts, the longer it sleeps, in
proportion, and the longer the more ranks share a core: a hundred that wait leave it to the one that
they wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from smdistributed.modelparallel.common.comm.transport import (
    FAREWELL_SECONDS,
    PeersMissingError,
    Posted,
    Transport,
)
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.names_of_ranks import have

if TYPE_CHECKING:
    from mpi4py import MPI

_SPIN_SECONDS = 500e-6
_FIRST_SLEEP_SECONDS = 20e-6
#: Of a rank with a core of its own, and of any.
_SHORTEST_LIMIT_SECONDS, _LONGEST_LIMIT_SECONDS = 2e-3, 50e-3
#: How much later than it could a wait may end, as a part of it.
_LATER = 1 / 16
#: By how much sleeps within MPI's own waits may be longer than it asks for.
_SLACK_NANOSECONDS = 5_000_000
_PR_SET_TIMERSLACK = 29
_FAREWELL, _REPORT = 0, 1


class MPITransport(Transport):
    """Bytes over a duplicate of ``MPI.COMM_WORLD``.

    Collective: every rank of the world constructs it.
    """

    #: Larger ones may need the sender in MPI while they travel; the least that libraries send at
    #: once is 4 KiB.
    largest_alone = 2048

    def __init__(self) -> None:
        super().__init__()
        import mpi4py

        mpi4py.rc.initialize = False
        # We finalise in ``close``: at exit MPI would wait, deaf, for ranks that wait for us.
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._mpi = MPI
        if not MPI.Is_initialized():
            with _late_wakeups():
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        check_size(MPI.COMM_WORLD.size, os.environ, MPI.Get_library_version())
        self._comm = MPI.COMM_WORLD.Dup()
        # Ranks that end say so here, so that nobody goes on waiting for them.
        self._farewell = MPI.COMM_WORLD.Dup()
        host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.is_one_machine = host.size == self.size
        self.local_rank, self.local_size = place_on_host(os.environ, host.rank, host.size)
        # Not the cores that this rank is bound to: each may have its own.
        longest = longest_sleep(host.size, os.cpu_count() or 1)
        self._pause = functools.partial(_Pause, longest)
        host.Free()
        self._ended: dict[int, bytes] = {}
        self._reports: dict[int, bytes] = {}
        self._awaited: Collection[int] = ()

    @property
    def awaited(self) -> Sequence[int]:  # type: ignore[override]
        """See ``Transport``."""
        return tuple(self._awaited)

    def post(self, payload: bytes, destinations: Sequence[int], channel: int) -> Posted:
        """See ``Transport.post``."""
        buffer = [payload, self._mpi.BYTE]
        requests = {
            rank: self._comm.Issend(buffer, dest=rank, tag=channel) for rank in destinations
        }
        return _Requests(requests, payload, self._poll)

    def receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        """See ``Transport.receive``."""
        received: dict[int, bytearray] = {}
        waiting: dict[int, MPI.Request | None] = dict.fromkeys(sources)
        status = self._mpi.Status()

        def step() -> bool:
            for rank, request in list(waiting.items()):
                if request is None:
                    message = self._comm.Improbe(source=rank, tag=channel, status=status)
                    if message is None:
                        continue
                    received[rank] = bytearray(status.Get_count(self._mpi.BYTE))
                    request = message.Irecv([received[rank], self._mpi.BYTE])
                    waiting[rank] = request
                if request.Test():
                    del waiting[rank]
            return not waiting

        def silent() -> set[int]:
            # A rank may have ended while its last message is still on the way.
            return {rank for rank, request in waiting.items() if request is None}

        self._poll(step, waiting, silent, timeout_seconds)
        return [received[rank] for rank in sources]

    def farewells(self) -> Mapping[int, bytes]:
        """See ``Transport.farewells``."""
        self._hear_if_any_thread_may()
        return dict(self._ended)

    def report(self, words: bytes) -> None:
        """See ``Transport.report``."""
        for rank in range(self.size):
            if rank != self.rank:
                buffer = [words, self._mpi.BYTE]
                self._farewell.Isend(buffer, dest=rank, tag=_REPORT).Free()

    def reports(self) -> Mapping[int, bytes]:
        """See ``Transport.reports``."""
        self._hear_if_any_thread_may()
        return dict(self._reports)

    def close(self, release: Callable[[], None], last_words: bytes = b"") -> None:
        """See ``Transport.close``."""
        # Beyond the release there is no deadline: a peer may have honest work left, and one that
        # waits for this rank learns from the farewell that nothing will come.
        if self._mpi.Is_finalized():
            return
        peers = {rank for rank in range(self.size) if rank != self.rank}
        buffer = [last_words, self._mpi.BYTE]
        sent = [self._farewell.Isend(buffer, dest=rank, tag=_FAREWELL) for rank in peers]
        release_at = time.monotonic() + FAREWELL_SECONDS
        released = False
        pause = self._pause()
        while not (
            self._hear_farewells().keys() >= peers and all(request.Test() for request in sent)
        ):
            if not released and time.monotonic() > release_at:
                released = True
                release()
            pause()
        if not released:
            release()
        self._mpi.Finalize()

    def _poll(
        self,
        step: Callable[[], bool],
        waiting: Collection[int],
        silent: Callable[[], set[int]],
        timeout_seconds: float,
    ) -> None:
        """Repeats ``step`` until it returns True, a silent rank ends, or time is up."""
        former, self._awaited = self._awaited, waiting
        try:
            self._poll_for(step, waiting, silent, timeout_seconds)
        finally:
            self._awaited = former

    def _poll_for(
        self,
        step: Callable[[], bool],
        waiting: Collection[int],
        silent: Callable[[], set[int]],
        timeout_seconds: float,
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        pause = self._pause()
        while not step():
            pause()
            if pause.sleeping:
                self._hear_farewells()
                if self._ended.keys() & silent():
                    if step():
                        return
                    if gone := self._ended.keys() & silent():
                        raise PeersMissingError(sorted(gone), f"{have(gone)} ended")
                if time.monotonic() > deadline:
                    raise PeersMissingError(
                        sorted(waiting), f"did not answer within {timeout_seconds:g} s"
                    )

    def _hear_if_any_thread_may(self) -> None:
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            self._hear_farewells()

    def _hear_farewells(self) -> Mapping[int, bytes]:
        status = self._mpi.Status()
        while (message := self._farewell.Improbe(status=status)) is not None:
            words = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([words, self._mpi.BYTE])
            said = self._ended if status.Get_tag() == _FAREWELL else self._reports
            said[status.Get_source()] = bytes(words)
        return self._ended


class _Requests:
    """Messages that are being sent.

    Args:
        waiting: the request of each destination.
        payload: stays in memory until all have it.
        poll: repeats a step until it returns True, or its time is up.
    """

    def __init__(
        self, waiting: dict[int, MPI.Request], payload: bytes, poll: Callable[..., None]
    ) -> None:
        self._waiting = waiting
        self._payload = payload
        self._poll = poll

    def wait(self, timeout_seconds: float) -> None:
        """See ``Posted.wait``."""
        self._poll(self._test, self._waiting, lambda: set(self._waiting), timeout_seconds)

    def _test(self) -> bool:
        for rank in [rank for rank, request in self._waiting.items() if request.Test()]:
            del self._waiting[rank]
        return not self._waiting


def place_on_host(environ: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """Returns the rank of this process on its host, and how many processes the host has.

    A host may be a part of a machine: a launcher that makes hosts of one says so in the variables.

    Args:
        environ: with the launcher's variables.
        rank: among the processes of this machine.
        size: their number.
    """
    told = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if told.isdecimal() and 0 < int(told) < size:
        return rank % int(told), int(told)
    return rank, size


def check_size(size: int, environ: Mapping[str, str], library: str) -> None:
    """Holds that the launcher and the MPI of mpi4py know the same job.

    Where they are of different implementations, each process is a world of its own.

    Args:
        size: number of processes of MPI's world.
        environ: where the launcher says how many it started.
        library: what this MPI calls itself.

    Raises:
        CommError: they differ.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        told = environ.get(name, "")
        if size == 1 and told.isdecimal() and int(told) > 1:
            raise CommError(
                "the launcher and mpi4py must use the same MPI: the launcher started "
                f"{told} processes ({name}), and the MPI of mpi4py, "
                f"{library.splitlines()[0].strip(chr(0))}, knows this one alone. Start the job "
                f"with smprun, or with the mpirun that belongs to that MPI; or install mpi4py for "
                "the launcher's."
            )


def longest_sleep(num_ranks: int, num_cores: int) -> float:
    """Returns how many seconds a rank that waits sleeps at most.

    Args:
        num_ranks: on this machine.
        num_cores: of this machine.
    """
    return min(_SHORTEST_LIMIT_SECONDS * max(1.0, num_ranks / num_cores), _LONGEST_LIMIT_SECONDS)


@contextlib.contextmanager
def _late_wakeups() -> Iterator[None]:
    """Inside, the kernel may wake this thread later than it asks for.

    Open MPI starts by looking every 100 us whether all ranks are there. Where many share a core, it
    is that which keeps the last ones from coming.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    if prctl is None:
        yield
        return
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS))
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0))  # what it was when the thread began


class _Pause:
    """One waiting period: yields the processor at first, then sleeps longer and longer.

    Args:
        longest_seconds: of a sleep.
    """

    def __init__(self, longest_seconds: float) -> None:
        self.sleeping = False
        self._longest_seconds = longest_seconds
        self._began = time.monotonic()

    def __call__(self) -> None:
        waited_seconds = time.monotonic() - self._began
        if not self.sleeping:
            os.sched_yield()
            self.sleeping = waited_seconds > _SPIN_SECONDS
            return
        seconds = max(_FIRST_SLEEP_SECONDS, _LATER * waited_seconds)
        time.sleep(min(seconds, self._longest_seconds))
