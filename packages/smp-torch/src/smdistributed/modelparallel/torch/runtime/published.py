"""Values that one rank of a pipeline has, left where the others find them.

Every rank runs the same Python between two steps, but ``parameter.norm().item()`` needs a number
that one of them has. That rank leaves it in the store of the job and goes on; whoever asks at the
same place of the script takes it from there. So a rank may read what it has by itself, as for a
log, and one that asks for what the other does not read learns it when that makes its next call
with all ranks, as at the start of a step.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.common.errors import CommError

#: The most that stores take at a time is 8 MiB.
_LARGEST_BYTES = 4 << 20
_SPIN_SECONDS = 2e-3
_LONGEST_SLEEP_SECONDS = 5e-3


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: Any) -> None:
        """Gives a key a value, and does not wait."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key that has one."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all of these keys have values."""

    def delete_key(self, key: str) -> bool:
        """Takes a key away; returns whether it was there."""


class NotPublishedError(Exception):
    """The rank that has a value does not read it where others ask for it."""


class Published:
    """What the ranks of a pipeline leave for each other between steps.

    Args:
        store: of the job.
        rank: this one, of the job.
        pipeline: the ranks of the own pipeline.
        timeout_seconds: how long a rank may take to come to what another one asks for.
        ended: tells which ranks have ended.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        pipeline: Sequence[int],
        timeout_seconds: float,
        ended: Callable[[], Collection[int]],
    ) -> None:
        self._store = store
        self._rank = rank
        self._pipeline = pipeline
        self._timeout_seconds = timeout_seconds
        self._ended = ended
        #: How many steps have begun, and calls with all ranks, on those of a pipeline alike.
        self._moment = self._calls = 0
        self._left: list[str] = []
        self._left_before: list[str] = []
        #: How often something was left, or asked for, at one place since.
        self._counts: Counter[tuple[int, str]] = Counter()

    def begin_step(self) -> None:
        """Takes note that nobody asks any more for what was left before the last step."""
        self._moment += 1
        self._go_on()
        for key in self._left_before:
            self._store.delete_key(key)
        self._left_before, self._left = self._left, []
        self._counts.clear()

    def note_call(self, _: str, ranks: Sequence[int]) -> None:
        """Takes note that this rank comes to a call that some ranks make together."""
        if set(self._pipeline) <= set(ranks):
            self._go_on()

    def _go_on(self) -> None:
        self._calls += 1
        self._store.set(self._calls_of(self._rank), str(self._calls))

    def leave(self, name: str, values: torch.Tensor) -> None:
        """Leaves values of this rank, which does not wait for who takes them.

        Args:
            name: of the place and of what the values are, the same on every rank.
            values: with memory.
        """
        key = self._key(self._rank, name)
        flat = values.detach().to("cpu").contiguous().view(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        starts = range(0, len(data), _LARGEST_BYTES)
        for number, start in enumerate(starts):
            self._set(f"{key}/{number}", data[start : start + _LARGEST_BYTES])
        form = {"dtype": str(values.dtype), "shape": list(values.shape), "parts": len(starts)}
        self._set(key, json.dumps(form))

    def take(self, rank: int, name: str) -> torch.Tensor:
        """Returns values that another rank leaves, on the host.

        Raises:
            NotPublishedError: it has gone on to a call with all ranks, and left none.
            CommError: it has ended, or does not come to this place in time.
        """
        key = self._key(rank, name)
        self._wait(rank, key)
        form = json.loads(self._store.get(key))
        data = bytearray()
        for number in range(form["parts"]):
            data += self._store.get(f"{key}/{number}")
        dtype = getattr(torch, form["dtype"].removeprefix("torch."))
        if not math.prod(form["shape"]):
            return torch.empty(form["shape"], dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=dtype).view(form["shape"])

    def _set(self, key: str, value: Any) -> None:
        self._left.append(key)
        self._store.set(key, value)

    def _key(self, rank: int, name: str) -> str:
        self._counts[rank, name] += 1
        return f"smp/value/{rank}/{self._moment}/{name}/{self._counts[rank, name]}"

    @staticmethod
    def _calls_of(rank: int) -> str:
        return f"smp/calls/{rank}"

    def _wait(self, rank: int, key: str) -> None:
        began = time.monotonic()
        sleep_seconds = 0.0
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > _SPIN_SECONDS:
                if self._has_gone_on(rank) and not self._store.check([key]):
                    raise NotPublishedError
                if rank in self._ended() and not self._store.check([key]):
                    raise self._missing(rank, "has ended")
                if waited > self._timeout_seconds:
                    raise self._missing(rank, f"did not within {self._timeout_seconds:g} s")
                sleep_seconds = min(sleep_seconds + 1e-4, _LONGEST_SLEEP_SECONDS)
            time.sleep(sleep_seconds)

    def _has_gone_on(self, rank: int) -> bool:
        key = self._calls_of(rank)
        return self._store.check([key]) and int(self._store.get(key)) > self._calls

    def _missing(self, rank: int, why: str) -> CommError:
        return CommError(
            f"rank {self._rank} asks for a value of a parameter that rank {rank} has, and reads at "
            f"the same line, since every rank runs the same Python: rank {rank} {why}.",
            rank=self._rank,
            missing_ranks=(rank,),
        )
