"""Numbers that ranks of one host compare in memory that they share.

Ranks of a group tell each other what they are about to do, before every module that they compute
together. Over a socket that takes half a millisecond, and while Python confirms what a GPU computes
it adds up: to 27 ms a step of a Llama of 22 layers, under a profiler. In memory it takes some
microseconds.

A rank has two places that it alone writes to, in turn. Nobody writes the number after next before
all have read this one, since who compares waits for all; so nothing is written over that somebody
still reads. A place tells which comparison it is of, and a checksum tells whether all of it is
there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.collectives.interface import Collectives

#: So many numbers can be compared.
MOST_NUMBERS = 64
#: Checksum of all that follows, number of the comparison, how many numbers.
_HEAD = struct.Struct("<Iqi")
_PLACE_BYTES = _HEAD.size + 8 * MOST_NUMBERS
_IN_MEMORY = "/dev/shm"
#: So long a rank looks without a pause; others are about as far as it is.
_LOOK_SECONDS = 1e-4
_SHORTEST_SLEEP, _LONGEST_SLEEP = 2e-5, 1e-3
#: So often it asks whether the others are still there.
_ASK_SECONDS = 0.1


class HostNumbers:
    """Compares numbers over shared memory.

    Args:
        memory: of ``num_bytes(size)``, zeros at first, which all ranks see.
        size: how many ranks there are.
        rank: which of them this is.
        are_there: whether the processes of all ranks still run.
        timeout: seconds that a rank waits for another one.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        size: int,
        rank: int,
        are_there: Callable[[], bool],
        timeout: float,
    ) -> None:
        self._memory = memory
        self._size = size
        self._rank = rank
        self._are_there = are_there
        self._timeout = timeout
        self._turn = 0

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks. Collective: they.

        Args:
            numbers: at most ``MOST_NUMBERS`` that 64 bits hold, as many from each rank.

        Raises:
            SMPError: another rank gives more of them, or fewer.
            RuntimeError: another rank is gone, or does not come in time.
        """
        self._turn += 1
        words = struct.pack(f"<qi{len(numbers)}q", self._turn, len(numbers), *numbers)
        place = self._place(self._rank)
        record = struct.pack("<I", zlib.crc32(words)) + words
        self._memory[place : place + len(record)] = record
        found = [
            list(numbers) if rank == self._rank else self._await(rank) for rank in range(self._size)
        ]
        if any(len(each) != len(numbers) for each in found):
            raise SMPError(
                "ranks that compare numbers must give as many of them; received by rank: "
                f"{', '.join(str(len(each)) for each in found)}."
            )
        return found

    def _place(self, rank: int) -> int:
        return (2 * rank + self._turn % 2) * _PLACE_BYTES

    def _await(self, rank: int) -> list[int]:
        began = time.monotonic()
        asked, pause = began, _SHORTEST_SLEEP
        while (found := self._read(rank)) is None:
            now = time.monotonic()
            if now < began + _LOOK_SECONDS:
                time.sleep(0)  # another thread of this process may have something to do
                continue
            if now > asked + _ASK_SECONDS:
                asked = now
                # Once more: it may have written, and ended in order since.
                if not self._are_there() and (found := self._read(rank)) is None:
                    raise RuntimeError("Connection closed: a process is gone")
            if now > began + self._timeout:
                raise RuntimeError(f"Timed out after {self._timeout:.0f} seconds")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
        return found

    def _read(self, rank: int) -> list[int] | None:
        """Returns what a rank gives in this turn, once all of it is there."""
        place = self._place(rank)
        checksum, turn, count = _HEAD.unpack_from(self._memory, place)
        if turn != self._turn or not 0 <= count <= MOST_NUMBERS:
            return None
        end = place + _HEAD.size + 8 * count
        words = self._memory[place + 4 : end]
        if zlib.crc32(words) != checksum:
            return None
        return list(struct.unpack_from(f"<{count}q", words, _HEAD.size - 4))


def num_bytes(size: int) -> int:
    """Returns how much memory as many ranks need."""
    return 2 * size * _PLACE_BYTES


def host_numbers(
    collectives: Collectives, host: str, are_there: Callable[[], bool], timeout: float
) -> HostNumbers | None:
    """Returns what compares numbers of a group whose ranks are on one host; else None.

    Collective: the group; each rank gets the same answer.

    Args:
        collectives: of the group.
        host: that this rank is on; empty if that is unknown.
        are_there, timeout: as of ``HostNumbers``.
    """
    size, rank = collectives.size, collectives.rank
    # All go by the same list: who knew less than the others would leave them waiting.
    if size == 1 or len(hosts := {*collectives.compare_texts(host)}) > 1 or "" in hosts:
        return None
    path = _made(size) if rank == 0 else ""
    path = collectives.compare_texts(path)[0]
    memory = _opened(path, size) if path else None
    have_all = all(each[0] for each in collectives.compare([memory is not None]))
    if rank == 0 and path:
        os.unlink(path)  # it lasts as long as somebody has it open
    if memory is None or not have_all:
        return None
    return HostNumbers(memory, size, rank, are_there, timeout)


def _made(size: int) -> str:
    """Returns the path of a new file of zeros; "" where there can be none."""
    for folder in (_IN_MEMORY, None):
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="smp-", dir=folder)
            try:
                os.posix_fallocate(handle, 0, num_bytes(size))
            finally:
                os.close(handle)
            return path
    return ""


def _opened(path: str, size: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(handle, num_bytes(size))
        finally:
            os.close(handle)
    return None
