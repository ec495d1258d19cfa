"""The control plane's transport over torch.distributed, for jobs that torchrun starts.

It uses a gloo group of its own, so that jobs need no MPI and messages never meet the data plane's.
Waiting happens inside gloo, with a time-out; a peer's death closes its connection and ends the wait
at once. Sending is synchronous by an acknowledgement.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.comm.transport import (
    FAREWELL_SECONDS,
    PeersMissingError,
    Transport,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    past_dispatch_modes,
    past_function_modes,
)
from smdistributed.modelparallel.torch.execute.peers import reason_of

#: Above every channel's two tags.
_FAREWELL_TAG = 1 << 20


class TorchTransport(Transport):
    """Bytes over a gloo group of all processes.

    Collective: every rank of the world constructs it, after ``init_process_group``.

    Args:
        timeout_seconds: how long joining the group may take.
    """

    def __init__(self, timeout_seconds: float) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def send(
        self, payload: bytes, destinations: Sequence[int], channel: int, timeout_seconds: float
    ) -> None:
        """See ``Transport.send``."""
        with _on_host():
            self._send(payload, destinations, channel, timeout_seconds)

    def _send(
        self, payload: bytes, destinations: Sequence[int], channel: int, timeout_seconds: float
    ) -> None:
        wait = _Deadline(timeout_seconds)
        header = torch.tensor([len(payload)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
        data, acknowledgement = 2 * channel, 2 * channel + 1

        def start(rank: int) -> Iterator[dist.Work]:
            yield self._group.send([header], rank, data)
            if payload:
                yield self._group.send([body], rank, data)
            received = torch.empty(1, dtype=torch.uint8)
            yield self._group.recv([received], rank, acknowledgement)

        wait.for_all(destinations, start)

    def receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        """See ``Transport.receive``."""
        with _on_host():
            return self._receive(sources, channel, timeout_seconds)

    def _receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        wait = _Deadline(timeout_seconds)
        data, acknowledgement = 2 * channel, 2 * channel + 1
        headers = {rank: torch.empty(1, dtype=torch.int64) for rank in sources}
        wait.for_all(sources, lambda rank: [self._group.recv([headers[rank]], rank, data)])
        buffers = {rank: bytearray(int(header)) for rank, header in headers.items()}
        wait.for_all(
            [rank for rank, buffer in buffers.items() if buffer],
            lambda rank: [self._group.recv([_view(buffers[rank])], rank, data)],
        )
        done = torch.zeros(1, dtype=torch.uint8)
        wait.for_all(sources, lambda rank: [self._group.send([done], rank, acknowledgement)])
        return [buffers[rank] for rank in sources]

    def close(self, release: Callable[[], None], last_words: bytes = b"") -> None:
        """See ``Transport.close``."""

        def start(rank: int) -> Iterator[dist.Work]:
            byte = torch.zeros(1, dtype=torch.uint8)
            yield self._group.send([byte], rank, _FAREWELL_TAG)
            yield self._group.recv([byte.clone()], rank, _FAREWELL_TAG)

        peers = [rank for rank in range(self.size) if rank != self.rank]
        with _on_host(), contextlib.suppress(PeersMissingError):
            _Deadline(FAREWELL_SECONDS).for_all(peers, start)
        release()


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


class _Deadline:
    """Waits for gloo's works until one point in time and says which ranks failed, and how."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._end = time.monotonic() + timeout_seconds

    def for_all(self, ranks: Sequence[int], start: Callable[[int], Iterable[dist.Work]]) -> None:
        """Starts what concerns each rank, then waits for all of it.

        Raises:
            PeersMissingError: something could not be started, or did not end.
        """
        started: list[tuple[int, dist.Work]] = []
        problems: dict[int, str] = {}
        for rank in ranks:
            # Gloo refuses to start anything with a rank that it knows to be gone.
            with self._noting(problems, rank):
                started.extend((rank, work) for work in start(rank))
        for rank, work in started:
            with self._noting(problems, rank):
                # Never zero: gloo reads that as its own default.
                left = max(0.001, self._end - time.monotonic())
                work.wait(timedelta(seconds=left))
        if problems:
            raise PeersMissingError(sorted(problems), next(iter(problems.values())))

    @contextlib.contextmanager
    def _noting(self, problems: dict[int, str], rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            problems.setdefault(rank, self._reason(error))

    def _reason(self, error: RuntimeError) -> str:
        if time.monotonic() >= self._end:
            return f"did not answer within {self._timeout_seconds:g} s"
        return f"has ended ({reason_of(error)})"
