"""How ranks wait for messages of MPI, which have to be looked for."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.comm import mpi


class Clock:
    """Time that passes in sleeps, and a microsecond at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[tuple[float, float]] = []
        monkeypatch.setattr(mpi.time, "monotonic", self.read)
        monkeypatch.setattr(mpi.time, "sleep", self.sleep)

    def read(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.now, seconds))
        self.now += seconds


def looks_within(seconds: float, clock: Clock) -> int:
    began, pause, looks = clock.now, mpi._Pause(), 0
    while clock.now < began + seconds:
        pause()
        looks += 1
    return looks


def test_a_short_wait_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    looks_within(400e-6, clock)
    assert not clock.slept


def test_a_long_wait_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    looks_within(1, clock)
    assert len(clock.slept) < 200
    before = len(clock.slept)
    looks_within(60, clock)
    assert len(clock.slept) - before < 1500


def test_no_wait_ends_much_later_than_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    began = clock.now
    looks_within(60, clock)
    for at, seconds in clock.slept:
        assert seconds <= max(50e-6, (at - began) / 10)
        assert seconds <= 0.1
