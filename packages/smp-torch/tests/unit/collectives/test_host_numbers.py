"""Comparing numbers over shared memory; threads stand for ranks."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.collectives import host_numbers as module
from smdistributed.modelparallel.torch.collectives.host_numbers import (
    MOST_NUMBERS,
    HostNumbers,
    host_numbers,
    num_bytes,
)

_SIZE = 3


def ranks(
    are_there: Callable[[], bool] = lambda: True, timeout: float = 60.0
) -> tuple[mmap.mmap, list[HostNumbers]]:
    """Returns memory and what compares numbers over it, for each rank."""
    memory = mmap.mmap(-1, num_bytes(_SIZE))
    return memory, [HostNumbers(memory, _SIZE, rank, are_there, timeout) for rank in range(_SIZE)]


def test_each_rank_has_the_numbers_of_all_whoever_comes_first() -> None:
    draws = random.Random(0)
    turns = [
        [[draws.randrange(-(2**63), 2**63) for _ in range(count)] for _ in range(_SIZE)]
        for count in (draws.randrange(MOST_NUMBERS + 1) for _ in range(300))
    ]
    _, every = ranks()
    with ThreadPoolExecutor(_SIZE) as pool:
        found = pool.map(
            lambda rank: [every[rank].compare(turn[rank]) for turn in turns], range(_SIZE)
        )
        assert list(found) == [turns] * _SIZE


def test_what_is_half_written_is_waited_for() -> None:
    memory, every = ranks()
    written = threading.Event()

    def late(rank: int) -> list[list[int]]:
        written.wait()
        return every[rank].compare([rank, 7])

    with ThreadPoolExecutor(_SIZE) as pool:
        first = pool.submit(every[0].compare, [0, 7])
        for rank in (1, 2):
            pool.submit(late, rank)
        # Rank 1's place of this turn, its head there, and its numbers not.
        own = HostNumbers(mmap.mmap(-1, num_bytes(_SIZE)), 1, 0, lambda: True, 1.0)
        own.compare([1, 7])
        size = num_bytes(_SIZE) // (2 * _SIZE)
        memory[3 * size : 3 * size + 16] = own._memory[size : size + 16]
        with pytest.raises(TimeoutError):
            first.result(0.2)
        written.set()
        assert first.result() == [[0, 7], [1, 7], [2, 7]]


def test_who_is_gone_or_late_or_says_more_is_an_error() -> None:
    _, every = ranks(are_there=lambda: False)
    with pytest.raises(RuntimeError, match="a process is gone"):
        every[0].compare([1])
    _, every = ranks(timeout=0.2)
    with pytest.raises(RuntimeError, match="Timed out"):
        every[0].compare([1])
    _, every = ranks()
    with ThreadPoolExecutor(_SIZE) as pool:
        found = [pool.submit(each.compare, [1] * (1 + rank)) for rank, each in enumerate(every)]
        for each in found:
            with pytest.raises(SMPError, match="received by rank: 1, 2, 3"):
                each.result()


class Threads:
    """What ranks that are threads tell each other by; see ``Collectives``."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.size, self.rank = _SIZE, rank
        self._said, self._barrier = said, barrier

    def compare_texts(self, text: str) -> list[str]:
        return self._everyones(text)

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._everyones(list(numbers))

    def _everyones(self, own: Any) -> list[Any]:
        self._said[self.rank] = own
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found


@pytest.mark.parametrize(
    ("hosts", "unable", "can"),
    [
        (["one"] * _SIZE, None, True),
        (["one", "one", "other"], None, False),
        (["one", "", "one"], None, False),
        ([""] * _SIZE, None, False),
        (["one"] * _SIZE, 2, False),
        (["one"] * _SIZE, 0, False),
    ],
)
def test_all_ranks_of_one_host_share_memory_or_none(
    hosts: list[str],
    unable: int | None,
    can: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = module._opened
    own = threading.local()
    monkeypatch.setattr(module, "_IN_MEMORY", str(tmp_path))
    monkeypatch.setattr(
        module,
        "_opened",
        lambda path, size: None if own.rank == unable else opened(path, size),
    )
    said, barrier = [None] * _SIZE, threading.Barrier(_SIZE, timeout=30)

    def make(rank: int) -> list[list[int]] | None:
        own.rank = rank
        found = host_numbers(Threads(rank, said, barrier), hosts[rank], lambda: True, 30.0)  # type: ignore[arg-type]
        return None if found is None else found.compare([rank])

    with ThreadPoolExecutor(_SIZE) as pool:
        found = list(pool.map(make, range(_SIZE)))
    assert found == [[[0], [1], [2]] if can else None] * _SIZE
    assert not list(tmp_path.iterdir())
