"""The control plane's transport over torch.distributed, for jobs that torchrun starts.

It uses a gloo group of its own, so that jobs need no MPI and messages never meet the data plane's.
Waiting happens inside gloo, with a time-out; a peer's death closes its connection and ends the wait
at once. Sending ends with an acknowledgement.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.comm.transport import (
    FAREWELL_SECONDS,
    PeersMissingError,
    Posted,
    Transport,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    past_dispatch_modes,
    past_function_modes,
)
from smdistributed.modelparallel.torch.execute.peers import reason_of
from smdistributed.modelparallel.torch.runtime.joining import Store

#: Above every channel's two tags.
_FAREWELL_TAG = 1 << 20
_REPORT_KEY = "smp/report"


class TorchTransport(Transport):
    """Bytes over a gloo group of all processes.

    Collective: every rank of the world constructs it, after ``init_process_group``.

    Args:
        timeout_seconds: how long joining the group may take.
        store: of the job, where ranks leave their last words; None where the script has joined.
    """

    #: Gloo has a thread of its own.
    largest_alone = sys.maxsize

    def __init__(self, timeout_seconds: float, store: Store | None = None) -> None:
        super().__init__()
        self._store = store
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.is_one_machine = self.local_size == self.size
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def post(self, payload: bytes, destinations: Sequence[int], channel: int) -> Posted:
        """See ``Transport.post``."""
        data, acknowledgement = 2 * channel, 2 * channel + 1

        def start(rank: int) -> Iterator[dist.Work]:
            yield self._group.send([header], rank, data)
            if payload:
                yield self._group.send([body], rank, data)
            received = torch.empty(1, dtype=torch.uint8)
            yield self._group.recv([received], rank, acknowledgement)

        with _on_host():
            header = torch.tensor([len(payload)], dtype=torch.int64)
            body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
            return _Works(destinations, start)

    def receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        """See ``Transport.receive``."""
        with _on_host():
            return self._receive(sources, channel, timeout_seconds)

    def _receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        end = time.monotonic() + timeout_seconds

        def all_of(ranks: Sequence[int], start: Callable[[int], Iterable[dist.Work]]) -> None:
            _Works(ranks, start).wait(timeout_seconds, end)

        data, acknowledgement = 2 * channel, 2 * channel + 1
        headers = {rank: torch.empty(1, dtype=torch.int64) for rank in sources}
        all_of(sources, lambda rank: [self._group.recv([headers[rank]], rank, data)])
        buffers = {rank: bytearray(int(header)) for rank, header in headers.items()}
        all_of(
            [rank for rank, buffer in buffers.items() if buffer],
            lambda rank: [self._group.recv([_view(buffers[rank])], rank, data)],
        )
        done = torch.zeros(1, dtype=torch.uint8)
        all_of(sources, lambda rank: [self._group.send([done], rank, acknowledgement)])
        return [buffers[rank] for rank in sources]

    def farewells(self) -> Mapping[int, bytes]:
        """See ``Transport.farewells``."""
        store, found = self._store, dict[int, bytes]()
        if store is None:
            return found
        with contextlib.suppress(RuntimeError):  # the store ends with the process that has it
            for rank in range(self.size):
                if rank != self.rank and store.check([_farewell_key(rank)]):
                    found[rank] = store.get(_farewell_key(rank))
        return found

    def report(self, words: bytes) -> None:
        """See ``Transport.report``; the first one is kept."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_REPORT_KEY, "", f"{self.rank} {words.decode()}")

    def reports(self) -> Mapping[int, bytes]:
        """See ``Transport.reports``."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([_REPORT_KEY]):
                rank, _, words = self._store.get(_REPORT_KEY).decode().partition(" ")
                return {} if int(rank) == self.rank else {int(rank): words.encode()}
        return {}

    def close(self, release: Callable[[], None], last_words: bytes = b"") -> None:
        """See ``Transport.close``."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_farewell_key(self.rank), last_words.decode())

        def start(rank: int) -> Iterator[dist.Work]:
            byte = torch.zeros(1, dtype=torch.uint8)
            yield self._group.send([byte], rank, _FAREWELL_TAG)
            yield self._group.recv([byte.clone()], rank, _FAREWELL_TAG)

        peers = [rank for rank in range(self.size) if rank != self.rank]
        with _on_host(), contextlib.suppress(PeersMissingError):
            _Works(peers, start).wait(FAREWELL_SECONDS)
        release()


def _farewell_key(rank: int) -> str:
    return f"smp/farewell/{rank}"


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Makes and reads real tensors in the memory of this process.

    A message may be exchanged while a step is recorded on fakes, and a script may have another
    default device.
    """
    with past_function_modes(), past_dispatch_modes():
        yield


def _view(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


class _Works:
    """Works of gloo with several ranks, which are waited for together.

    Args:
        ranks: with which they are.
        start: starts those with one rank.
    """

    def __init__(self, ranks: Sequence[int], start: Callable[[int], Iterable[dist.Work]]) -> None:
        self._started: list[tuple[int, dist.Work]] = []
        self._problems: dict[int, str] = {}
        for rank in ranks:
            # Gloo refuses to start anything with a rank that it knows to be gone.
            with self._noting(rank):
                self._started.extend((rank, work) for work in start(rank))

    def wait(self, timeout_seconds: float, end: float | None = None) -> None:
        """Waits until all are done; see ``Posted.wait``.

        Args:
            timeout_seconds: how long all may take.
            end: when they have to be done, on the monotonic clock; by default so long from now.

        Raises:
            PeersMissingError: something could not be started, or did not end.
        """
        end = time.monotonic() + timeout_seconds if end is None else end
        too_late = f"did not answer within {timeout_seconds:g} s"
        for rank, work in self._started:
            with self._noting(rank, end, too_late):
                # Never zero: gloo reads that as its own default.
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        if self._problems:
            raise PeersMissingError(sorted(self._problems), next(iter(self._problems.values())))

    @contextlib.contextmanager
    def _noting(self, rank: int, end: float = math.inf, too_late: str = "") -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            is_late = time.monotonic() >= end
            reason = too_late if is_late else f"has ended ({reason_of(error)})"
            self._problems.setdefault(rank, reason)
