"""Memory of the ranks of a group that all of them read and write, and whether it works here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives

_TEST_BYTES = 1 << 16
_TEST_COUNT = _TEST_BYTES // 4


class SymmetricMemory(Protocol):
    """Equal pieces of memory on all ranks, which all of them read and write."""

    def piece(self, rank: int, start_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns some numbers of a rank."""

    def barrier(self) -> None:
        """What comes after it runs when all ranks have done what comes before theirs."""

    @property
    def num_channels(self) -> int:
        """How many signals of one rank to another may be under way at a time."""

    def signal(self, rank: int, channel: int) -> None:
        """Tells a rank that all that comes before, in the current stream, has been done.

        Args:
            rank: who is told, and has waited for the signal before this one of the channel.
            channel: less than ``num_channels``.
        """

    def wait(self, rank: int, channel: int) -> None:
        """What comes after it in the current stream runs when a rank has given its signal."""


#: Makes memory of so many bytes. Collective: TP_GROUP.
MakeMemory = Callable[[int], SymmetricMemory]


def why_not(
    make: MakeMemory, collectives: Collectives, place: str, synchronize: Callable[[], None]
) -> str:
    """Tries it; returns why the ranks cannot use each other's memory, empty if they can.

    Collective: TP_GROUP; each rank returns the same.

    Args:
        make: makes memory.
        collectives: between the ranks.
        place: names the host and the device of this rank; empty if that is
            unknown, or it wants no such memory.
        synchronize: waits until the device has done everything.
    """
    places = collectives.compare_texts(place)
    if not all(places):
        return "it is switched off, or a host is unknown"
    if len({each.partition(" ")[0] for each in places}) > 1:
        return "the ranks are on several hosts"
    if len(set(places)) < len(places):
        return "ranks share a GPU"
    attempt = _Attempt(make, collectives.rank, collectives.size, synchronize)
    # First without a barrier of the device, which cannot be survived if it does not work.
    for stage in (attempt.begin, attempt.check_first, attempt.meet, attempt.give, attempt.end):
        failure = _failure(stage, collectives)
        if failure:
            return failure
    return ""


def _failure(attempt: Callable[[], None], collectives: Collectives) -> str:
    """Returns what any rank says against an attempt; the same on all."""
    found = ""
    try:
        attempt()
    except Exception as error:  # of a driver, whatever it is
        reason = str(error).partition("\n")[0]
        found = f"rank {collectives.rank} of the group: {type(error).__name__}: {reason}"
    return next(filter(None, collectives.compare_texts(found)), "")


class _Attempt:
    """Stages of a trial; every rank has done one before the next begins."""

    def __init__(
        self, make: MakeMemory, rank: int, size: int, synchronize: Callable[[], None]
    ) -> None:
        self._make = make
        self._rank = rank
        self._size = size
        self._synchronize = synchronize
        self._memory: SymmetricMemory | None = None

    def begin(self) -> None:
        self._memory = self._make(_TEST_BYTES)
        self._write(0, self._rank)
        self._synchronize()

    def check_first(self) -> None:
        self._check(0)

    def meet(self) -> None:
        self._write(1, self._rank)
        self._here.barrier()
        self._check(1)
        self._synchronize()

    def give(self) -> None:
        """Has each rank's piece written by the rank before it."""
        self._here.barrier()
        self._write(2, (self._rank + 1) % self._size)
        self._here.barrier()
        self._check(2)
        self._synchronize()

    def end(self) -> None:
        self._here.barrier()
        self._synchronize()

    @property
    def _here(self) -> SymmetricMemory:
        assert self._memory is not None
        return self._memory

    def _write(self, turn: int, rank: int) -> None:
        piece = self._here.piece(rank, 0, _TEST_COUNT, torch.int32)
        piece.copy_(_pattern(rank, turn).to(piece.device))

    def _check(self, turn: int) -> None:
        for rank in range(self._size):
            got = self._here.piece(rank, 0, _TEST_COUNT, torch.int32).clone().cpu()
            if not torch.equal(got, _pattern(rank, turn)):
                raise RuntimeError(f"reads other numbers than rank {rank} of it has written")


def _pattern(rank: int, turn: int) -> torch.Tensor:
    return torch.arange(_TEST_COUNT, dtype=torch.int32, device="cpu") * 7 + 31 * rank + turn
