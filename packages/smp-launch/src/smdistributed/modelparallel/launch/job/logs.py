"""Shows the log of a job, from any process, while it grows.

One line a phase; lines of ranks in colours on a terminal, progress bars as they come.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, TextIO

from smdistributed.modelparallel.common.launcher.output import LineAssembler
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Phase, Status

_POLL_SECONDS = 0.2
#: Phases in which a script has printed nothing yet.
_BEFORE_LOGS: tuple[Phase, ...] = ("Starting", "Pending", "Downloading", "Training")
_COLOURS = (36, 32, 33, 35, 34, 31)
_RANK = re.compile(r"\[ *(\d+)\]")
_HOST = re.compile(r"algo-(\d+)")


class _Log:
    """The log of a host, read as far as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: BinaryIO = path.open("rb")
        self._lines = LineAssembler()

    def new_lines(self, is_last: bool) -> list[tuple[str, str]]:
        found = [*self._lines.feed(self._stream.read())]
        if is_last and (rest := self._lines.rest()):
            found.append((rest, b"\n"))
        return [(line.decode(errors="replace"), end.decode()) for line, end in found]

    def close(self) -> None:
        self._stream.close()


class Follower:
    """Shows a job until it ends. A context manager."""

    def __init__(
        self,
        folder: JobFolder,
        observe: Callable[[], Status],
        out: TextIO | None = None,
        *,
        with_logs: bool = True,
        with_phases: bool = True,
    ) -> None:
        self._folder = folder
        self._observe = observe
        self._out = out or sys.stdout
        self._with_logs = with_logs
        self._with_phases = with_phases
        self._is_terminal = self._out.isatty() and "NO_COLOR" not in os.environ
        self._shown: set[tuple[Phase, float]] = set()
        self._logs: dict[Path, _Log] = {}

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs.values():
            log.close()

    def show(self, *, until_end: bool) -> Status:
        """Shows what there is, and what comes until the end if that is asked for."""
        while True:
            status = self._observe()
            self._show_phases(status, _BEFORE_LOGS)
            self._show_logs(status.is_final)
            self._show_phases(status)
            if status.is_final or not until_end:
                return status
            time.sleep(_POLL_SECONDS)

    def _show_phases(self, status: Status, which: Collection[Phase] | None = None) -> None:
        if not self._with_phases:
            return
        for phase in status.secondary_status_transitions:
            key = (phase.status, phase.start_time)
            if key in self._shown:
                continue
            if which is not None and phase.status not in which:
                return
            self._shown.add(key)
            at = time.strftime("%H:%M:%S", time.localtime(phase.start_time))
            # Why a job failed, whoever waits for it is told by an error.
            is_told = phase.status_message and phase.status != "Failed"
            message = f": {phase.status_message}" if is_told else ""
            self._write(f"{at} {self._coloured(phase.status, 1)}{message}", "\n")

    def _show_logs(self, is_last: bool) -> None:
        if not self._with_logs:
            return
        found = sorted(self._folder.logs.glob("algo-*.log"), key=_number_of)
        for path in set(found) - set(self._logs):
            self._logs[path] = _Log(path)
        for path in found:
            for line, end in self._logs[path].new_lines(is_last):
                self._write(self._prefix(path) + self._coloured_rank(line), end)

    def _prefix(self, path: Path) -> str:
        """Names the host where there are several."""
        if len(self._logs) == 1:
            return ""
        return self._coloured(path.stem, _COLOURS[_number_of(path) % len(_COLOURS)]) + " "

    def _coloured_rank(self, line: str) -> str:
        found = _RANK.match(line)
        if not found:
            return line
        colour = _COLOURS[int(found[1]) % len(_COLOURS)]
        return self._coloured(found[0], colour) + line[found.end() :]

    def _coloured(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._is_terminal else text

    def _write(self, line: str, end: str) -> None:
        self._out.write(line + end)
        self._out.flush()


def _number_of(path: Path) -> int:
    found = _HOST.search(path.stem)
    return int(found[1]) if found else 0
