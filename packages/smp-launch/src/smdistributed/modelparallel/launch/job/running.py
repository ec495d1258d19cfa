"""Runs the processes of a job, keeps what they print, and ends them all."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from smdistributed.modelparallel.common.launcher import processes
from smdistributed.modelparallel.common.launcher.first_failure import signal_name
from smdistributed.modelparallel.common.launcher.output import LineAssembler
from smdistributed.modelparallel.launch.job.commands import Command

_TICK_SECONDS = 0.1
_PIECE_BYTES = 1 << 16
_TAIL_LINES = 30
#: What others have after the first failure.
_SOON_SECONDS = 10.0
_VERDICT = "smprun: "
#: What torchrun says last of the process that failed first, and of an error that it was not told.
_ROOT_CAUSE = "Root Cause"
_FACT = re.compile(r"\s*(rank|exitcode|traceback)\s*: (.*)")
_TAGGED = re.compile(r"\[rank(\d+)\]: (.*)")
_NOT_TOLD = "To enable traceback"

Ending = Literal["completed", "failed", "stopped", "timeout", "interrupted"]


@dataclass(frozen=True)
class Outcome:
    """How the processes ended.

    Attributes:
        ending: in a word.
        exit_code: of the first that failed, as a shell counts; 0 where none did.
        reason: in words; empty when all is well.
    """

    ending: Ending
    exit_code: int = 0
    reason: str = ""


class _Process:
    """A process with its log."""

    def __init__(self, command: Command, log: Path) -> None:
        self.host = command.host
        self.serves = command.serves
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._errors: dict[str, str] = {}
        self._lines = LineAssembler()
        self._log: BinaryIO = log.open("ab", buffering=0)
        self.process = subprocess.Popen(
            command.words,
            env=dict(command.environ),
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=processes.end_with_parent,
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout
        os.set_blocking(self.pipe.fileno(), False)

    def read(self, on_line: Callable[[str], None]) -> bool:
        """Keeps what there is; returns whether there may be more."""
        try:
            data = os.read(self.pipe.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return False
        self._log.write(data)
        lines = [line for line, _ in self._lines.feed(data)] if data else [self._lines.rest()]
        for line in lines:
            text = line.decode(errors="replace")
            if text.strip():
                self.tail.append(text)
                if tagged := _TAGGED.match(text):
                    self._errors[tagged[1]] = tagged[2]
                on_line(text)
        return bool(data)

    def close(self) -> None:
        self.pipe.close()
        self._log.close()

    def reason(self) -> str:
        """Says why the process failed."""
        code = self.process.returncode
        verdicts = [line.removeprefix(_VERDICT) for line in self.tail if line.startswith(_VERDICT)]
        if verdicts:
            return verdicts[-1]
        how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
        last = _root_cause(list(self.tail), self._errors) or next(reversed(self.tail), "")
        return f"{self.host}: {last} ({how})" if last else f"{self.host}: {how}"


def _root_cause(lines: Sequence[str], errors: Mapping[str, str]) -> str:
    """Returns which process failed first, and how, where torchrun says so; else nothing.

    Args:
        lines: the last ones of a log.
        errors: rank -> the last line that PyTorch has tagged with it.
    """
    start = next((i for i, line in enumerate(lines) if line.startswith(_ROOT_CAUSE)), len(lines))
    facts: dict[str, str] = {}
    for line in lines[start:]:
        if found := _FACT.fullmatch(line):
            facts[found[1]] = found[2]
        elif "traceback" in facts and not line.startswith("="):
            # Of more lines the last one is the error.
            facts["traceback"] = line.strip()
    if "traceback" not in facts or _NOT_TOLD not in facts["traceback"]:
        return facts.get("traceback", "")
    rank = facts.get("rank", "").partition(" ")[0]
    return f"rank {rank}: {errors.get(rank, 'failed')}"


class Run:
    """All processes of a job, from their start to their end. A context manager."""

    def __init__(
        self,
        commands: Sequence[Command],
        logs: Path,
        on_line: Callable[[str], None],
        grace_seconds: float,
    ) -> None:
        self._commands = commands
        self._logs = logs
        self._on_line = on_line
        self._grace_seconds = grace_seconds
        self._running: list[_Process] = []
        self._first: _Process | None = None
        self._asked: Outcome | None = None
        self._kill_at: float | None = None
        self._is_done = False

    def __enter__(self) -> Run:
        processes.become_reaper()
        self._selector = selectors.DefaultSelector()
        try:
            for command in self._commands:
                started = _Process(command, self._logs / f"{command.host}.log")
                self._running.append(started)
                self._selector.register(started.pipe, selectors.EVENT_READ, started)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        processes.kill_descendants(set())
        self._selector.close()
        for each in self._running:
            each.close()

    def wait(self, seconds: float, is_asked_to_stop: Callable[[], bool]) -> Outcome:
        """Waits for the end of all processes; asks them to end when it is time.

        Args:
            seconds: what they have.
            is_asked_to_stop: whether somebody wants the job to end.
        """
        deadline = time.monotonic() + seconds
        while any(each.process.poll() is None for each in self._running):
            self._relay(_TICK_SECONDS)
            if self._asked is None and is_asked_to_stop():
                self._end(Outcome("stopped", 0, "stopped on request"), self._grace_seconds)
            if self._asked is None and time.monotonic() > deadline:
                reason = f"ended after max_run ({seconds:g} s)"
                self._end(Outcome("timeout", 0, reason), self._grace_seconds)
            self._look_for_failures()
            self._end_servers()
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._send(signal.SIGKILL)
        self._look_for_failures()
        while self._relay(0.0):
            pass
        if self._asked is not None:
            return self._asked
        if self._first is not None:
            code = self._first.process.returncode
            return Outcome("failed", code if code > 0 else 128 - code, self._first.reason())
        return Outcome("completed")

    def last_lines(self) -> str:
        """Returns the end of the log of the host that failed first."""
        return "\n".join(self._first.tail) if self._first else ""

    def _end_servers(self) -> None:
        """Ends what serves when nobody is left to be served."""
        leading = [each for each in self._running if not each.serves]
        if not self._is_done and all(each.process.poll() == 0 for each in leading):
            self._is_done = True
            self._kill_at = self._kill_at or time.monotonic() + _SOON_SECONDS
            self._send(signal.SIGTERM)

    def _look_for_failures(self) -> None:
        failed = [each for each in self._running if each.process.poll() not in (None, 0)]
        if self._is_done:
            return
        if failed and self._asked is None and self._first is None:
            self._first = failed[0]
            self._kill_at = time.monotonic() + _SOON_SECONDS
            self._send(signal.SIGTERM)

    def _end(self, outcome: Outcome, grace_seconds: float) -> None:
        if self._first is None:
            self._asked = outcome
            needed = max(command.needs_seconds for command in self._commands)
            self._kill_at = time.monotonic() + grace_seconds + needed
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for each in self._running:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(number)

    def _relay(self, seconds: float) -> bool:
        came = False
        for key, _ in self._selector.select(seconds):
            more = key.data.read(self._on_line)
            came = came or more
            if not more and key.data.process.poll() is not None:
                self._selector.unregister(key.fileobj)
            elif not more:  # closed by a process that goes on
                time.sleep(seconds)
        return came
