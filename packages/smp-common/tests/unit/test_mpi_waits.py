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


#: Of ranks that are many times as many as cores.
CROWDED = mpi.longest_sleep(256, 2)


def wait(seconds: float, clock: Clock, longest_seconds: float) -> None:
    began, pause = clock.now, mpi._Pause(longest_seconds)
    while clock.now < began + seconds:
        pause()


def test_a_short_wait_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    wait(400e-6, clock, CROWDED)
    assert not clock.slept


def test_a_long_wait_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    wait(1, clock, CROWDED)
    assert len(clock.slept) < 200
    before = len(clock.slept)
    wait(60, clock, CROWDED)
    assert len(clock.slept) - before < 1500


def test_no_wait_ends_much_later_than_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    began = clock.now
    wait(60, clock, CROWDED)
    for at, seconds in clock.slept:
        assert seconds <= max(50e-6, (at - began) / 10)
        assert seconds <= 0.1


@pytest.mark.parametrize(("num_ranks", "num_cores"), [(1, 1), (2, 2), (8, 128)])
def test_ranks_with_cores_of_their_own_hear_at_once(
    num_ranks: int, num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    wait(10, clock, mpi.longest_sleep(num_ranks, num_cores))
    assert max(seconds for _, seconds in clock.slept) <= 2e-3
