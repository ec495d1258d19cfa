"""When passes run: by the clock of the host, on a GPU by events in its stream.

The host submits the passes of a GPU long before they run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes times that mean nothing before they are asked for."""

    def begin(self) -> None:
        """Begins a run; the marks of the former one lose their meaning."""

    def mark(self) -> Any:
        """Takes the time of all that comes before in the stream; waits for nothing."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns the times of marks, in seconds since the epoch, as other hosts have them too.

        Waits until the device has come to the last mark.
        """


class HostClock:
    """See ``Clock``: where passes run when the host calls them."""

    def begin(self) -> None:
        """See ``Clock``."""

    def mark(self) -> float:
        """See ``Clock``."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """See ``Clock``."""
        began = time.time() - time.perf_counter()
        return [began + mark for mark in marks]


class DeviceClock:
    """See ``Clock``: where passes run later, in the stream that is current when a run begins.

    Events are used again, and the stream is asked for once: both take longer than a mark.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._num_marks = 0
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """See ``Clock``."""
        self._stream = torch.cuda.current_stream()
        self._num_marks = 0

    def mark(self) -> torch.cuda.Event:
        """See ``Clock``."""
        if self._num_marks == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._num_marks]
        self._num_marks += 1
        event.record(self._stream)
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See ``Clock``."""
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last.record(self._stream)
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """Returns what takes the times of passes on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
