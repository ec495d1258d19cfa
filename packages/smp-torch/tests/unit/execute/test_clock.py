"""Times of passes, on the host and on a device that runs later."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.torch.execute.clock import DeviceClock, HostClock, clock_of


def test_the_host_has_the_time_of_the_epoch() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before = time.time()
    marks = [clock.mark(), clock.mark()]
    first, second = clock.seconds(marks)
    assert before - 1e-3 <= first <= second <= time.time() + 1e-3


class Event:
    """Stands for an event of a device that comes to it a second after the one before."""

    count = 0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: str) -> None:
        assert stream == "the current one"
        Event.count += 1
        self.at = Event.count

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, last: Any) -> float:
        assert last.is_over
        return 1e3 * (last.at - self.at)


def test_a_device_is_waited_for_when_times_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current one")
    clock = clock_of(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock)
    for num in (3, 2, 4):
        clock.begin()
        marks = [clock.mark() for _ in range(num)]
        for _ in range(2):
            times = clock.seconds(marks)
            assert [each - times[0] for each in times] == pytest.approx(list(range(num)))
            assert times[-1] + 1 <= time.time()
    assert Event.made == 4 + 6  # four of marks, one each time that times are asked for
