"""Says what a process is at while it builds a large graph, which can take minutes."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

#: Between two lines, and before the first: what takes less needs no word.
INTERVAL_SECONDS = 5.0


class Progress:
    """Within, prints what is being done, again and again, as long as it lasts.

    A thread prints, so that a stage which is one long call shows too.

    Args:
        what: is done, for the beginning of each line.
        is_shown: whether to print; one process of a job does.

    Attributes:
        stage: what it is at; to be set by who does it.
    """

    def __init__(self, what: str, is_shown: bool) -> None:
        self.stage = ""
        self._what = what
        self._is_shown = is_shown
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._print, name="smp-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._is_shown:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()

    def _print(self) -> None:
        start = time.monotonic()
        while not self._has_ended.wait(INTERVAL_SECONDS):
            seconds = time.monotonic() - start
            print(f"smp: {self._what}, {seconds:.0f} s: {self.stage}", file=sys.stderr, flush=True)
