"""A process that is silent for too long ends the one that watches it, with its rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from smdistributed.modelparallel.tensorflow.runtime import watch
from smdistributed.modelparallel.tensorflow.runtime.watch import Watch

TIMEOUT_SECONDS = 0.4


class EndedError(Exception):
    """Stands for the end of the process, in the thread that watches."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def leave(rank: int, error: BaseException) -> None:
        found.append(f"rank {rank}: {error}")
        raise EndedError

    monkeypatch.setattr(watch, "leave_for_exception", leave)
    monkeypatch.setattr(threading, "excepthook", lambda given: None)
    return found


def watching(
    monkeypatch: pytest.MonkeyPatch, is_silent: Callable[[int], bool], asks: int
) -> list[int]:
    """Runs a watch of rank 2 of 3 until it has asked so often, or ended; returns whom it asked."""
    asked: list[int] = []
    is_done = threading.Event()

    def silent_processes(ranks: Sequence[int], timeout_seconds: float) -> list[int]:
        asked.extend(ranks)
        if len(asked) >= asks:
            is_done.set()
        return list(ranks) if is_silent(len(asked)) else []

    monkeypatch.setattr(watch.processes, "silent_processes", silent_processes)
    one = Watch(2, 3, TIMEOUT_SECONDS)
    assert one.latest_seconds > TIMEOUT_SECONDS
    one.start()
    while not is_done.wait(0.05) and one._thread.is_alive():
        pass
    one.stop()
    return asked


def test_a_silent_process_ends_this_one(monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> None:
    asked = watching(monkeypatch, lambda number: True, 100)
    assert set(asked) == {0}, "the process after the last is the first"
    assert ends == ["rank 2: rank 0 did not answer in time (communication_timeout)."]


def test_answers_now_and_then_are_enough(monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> None:
    watching(monkeypatch, lambda number: number % 2 == 0, 12)
    assert not ends
