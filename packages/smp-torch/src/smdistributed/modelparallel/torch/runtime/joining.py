"""How the processes that torchrun started find each other, and say who does not come.

torch's own way to a process group waits for all of them without a word, and where one is gone,
until its time is up.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from smdistributed.modelparallel.common.comm.presence import Presence, absent
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.names_of_ranks import listed

_TICK_SECONDS = 0.05
#: How long others may take to start before a word is said about it.
_SAY_SECONDS = 10.0


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Gives a key a value."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key that has one."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Gives a key a value, if it has the expected one, or none where that is empty."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all of these keys have values."""


def meet(store: Store, rank: int, size: int, timeout_seconds: float) -> list[Presence]:
    """Waits until all processes of the job are there; returns where each of them runs.

    Collective: WORLD.

    Args:
        store: of the job.
        rank: global rank of this process.
        size: number of processes.
        timeout_seconds: how long the others may take.

    Raises:
        CommError: some did not come in time, or ended again.
    """
    keys = [f"smp/presence/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps(asdict(Presence.own())))
    began = look_at = time.monotonic()
    has_said = False
    while not store.check(keys):
        now = time.monotonic()
        if now > look_at:
            look_at = now + 1.0
            missing = [each for each in range(size) if not store.check([keys[each]])]
            there = [_read(store, keys[each]) for each in range(size) if each not in missing]
            if gone := absent(there, range(len(there))):
                ranks = [each for each in range(size) if each not in missing]
                raise _error(rank, [ranks[each] for each in gone], "ended while the job started")
            if missing and now > began + timeout_seconds:
                raise _error(rank, missing, f"did not come within {timeout_seconds:g} s")
            if missing and now > began + _SAY_SECONDS and not has_said:
                has_said = True
                sys.stderr.write(f"smp: rank {rank} waits for {listed(missing)} to start\n")
        time.sleep(_TICK_SECONDS)
    return [_read(store, key) for key in keys]


def _read(store: Store, key: str) -> Presence:
    return Presence(**json.loads(store.get(key)))


def _error(rank: int, others: Sequence[int], what: str) -> CommError:
    return CommError(
        f"rank {rank}: smp.init needs all processes of the job: {listed(others)} {what}. Look at "
        "its own output for the cause.",
        rank=rank,
        missing_ranks=others,
    )
