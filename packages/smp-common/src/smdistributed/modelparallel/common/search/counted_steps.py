"""A job that is measured: rank 0 writes down when steps begin, and all end after some of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from smdistributed.modelparallel.common.search.measurement import Wanted


class CountedSteps:
    """Counts the calls of a step function.

    Args:
        wanted: what is asked of the job.
        rank: of this process.
        device: that it computes on, as its driver names it.
        settle: waits until the device has computed what it was given.
    """

    def __init__(
        self, wanted: Wanted, rank: int, device: str, settle: Callable[[], None] = lambda: None
    ) -> None:
        self._wanted = wanted
        self._settle = settle
        self._calls = 0
        self._file = Path(wanted.file) if rank == 0 else None
        self._write(device, "w")

    def begins(self, step: str, close: Callable[[], None]) -> None:
        """Takes note of a call; ends the process if it is one too many.

        Args:
            step: name of the function that is called.
            close: leaves the job. Collective: WORLD.
        """
        if step != self._wanted.step:
            return
        self._settle()
        self._calls += 1
        self._write(repr(time.perf_counter()), "a")
        if self._calls == self._wanted.calls:
            close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _write(self, line: str, mode: str) -> None:
        if self._file is not None:
            with self._file.open(mode, encoding="utf-8") as stream:
                stream.write(f"{line}\n")
