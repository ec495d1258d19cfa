"""The processes of a job, from the launcher's start to the last one's end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from smdistributed.modelparallel.common import failure
from smdistributed.modelparallel.common.launcher import bootstrap, command, processes
from smdistributed.modelparallel.common.launcher.first_failure import (
    Banner,
    Verdict,
    judge,
    parse_banner,
)
from smdistributed.modelparallel.common.testing import fork_client

Launcher = Literal["smprun", "mpirun", "torchrun", "python", "fork", "smprun-fork"]

_GRACE_SECONDS = 3.0
_SHOWN_LINES = 60

#: What stands for a launcher that copies a process.
_WITHOUT_COPIES: dict[Launcher, Launcher] = {"fork": "torchrun", "smprun-fork": "smprun"}

#: How many processes each launcher has been asked for by this one.
started: Counter[str] = Counter()


class Processes(Protocol):
    """What ``subprocess.Popen`` and a forked job have in common.

    Attributes:
        pid: of the launcher; 0 for a forked job, which has none.
        returncode: its exit code, or None while it runs.
    """

    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises ``subprocess.TimeoutExpired``."""

    def terminate(self) -> None:
        """Asks for the end."""


def without_copies(launcher: Launcher, num_ranks: int) -> Launcher:
    """Returns what starts the same job where its processes cannot be copies of one."""
    if launcher == "fork" and num_ranks == 1:
        return "python"
    return _WITHOUT_COPIES.get(launcher, launcher)


class Job:
    """Processes that a launcher started, with files for what they print.

    Args:
        launcher: what starts them, or what stands for it where the environment asks for what copies
            do not have.
        num_ranks: how many; 1 for ``python``.
        program: a script and its arguments.
        env: variables to set, or to unset where the value is None.
        preload: modules that the server of ``fork`` and ``smprun-fork`` has imported before.
    """

    def __init__(
        self,
        launcher: Launcher,
        num_ranks: int,
        program: Sequence[str],
        env: Mapping[str, str | None] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        if launcher == "python" and num_ranks != 1:
            raise ValueError(
                f"launcher 'python' starts one process; received num_ranks {num_ranks}."
            )
        self.num_ranks = num_ranks
        given = _environment(env)
        if not _has_copies(given):
            launcher = without_copies(launcher, num_ranks)
        started[launcher] += num_ranks
        with contextlib.ExitStack() as stack:
            self._out = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            self._err = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            environ = stack.enter_context(command.own_files(given))
            streams = (self._out.fileno(), self._err.fileno())
            self._processes: Processes
            if launcher == "fork":
                server = fork_client.server_with(tuple(preload))
                self._processes = server.fork(num_ranks, program, environ, streams)
            else:
                if launcher == "smprun-fork":
                    server = fork_client.server_with(tuple(preload))
                    program = [f"--fork-from={server.address}", *program]
                self._processes = subprocess.Popen(
                    [*_launch(launcher, num_ranks), *program],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=self._out,
                    stderr=self._err,
                    start_new_session=True,
                )
            self._open = stack.pop_all()

    @property
    def exit_code(self) -> int | None:
        """The launcher's, None while the job runs."""
        return self._processes.returncode

    def has_ended(self, within_seconds: float = 0.0) -> bool:
        """Waits for the end and tells whether it came in time."""
        try:
            self._processes.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Ends what still runs; no process of the job is left afterwards."""
        if isinstance(self._processes, fork_client.ForkedProcesses):
            self._processes.terminate()
            self._processes.wait()
            return
        pid = self._processes.pid
        if not self.has_ended():
            below = processes.descendants(pid)
            self._processes.terminate()
            self.has_ended(_GRACE_SECONDS)
            for each in below | processes.descendants(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._processes.wait()

    def close(self) -> None:
        """Ends the job and gives its files back."""
        with self._open:
            self.end()

    def stdout(self) -> str:
        """Returns what the ranks have printed."""
        return _content(self._out.fileno())

    def stderr(self) -> str:
        """Returns what they have printed there, without what they say to smprun alone."""
        lines = _content(self._err.fileno()).splitlines()
        return "\n".join(line for line in lines if not (_record(line) or _is_mark(line)))

    def last_lines(self) -> str:
        """Returns the end of ``stderr``."""
        return "\n".join(self.stderr().splitlines()[-_SHOWN_LINES:])

    def verdict(self, known: Sequence[failure.FailureRecord] = ()) -> Verdict:
        """Returns who failed first, from what the ranks and the launcher said.

        Args:
            known: records of failures that nobody printed.
        """
        lines = _content(self._err.fileno()).splitlines()
        exit_code = self.exit_code or 0
        for line in reversed(lines):
            # smprun has judged, and shown the traceback last.
            if line.startswith("smprun: ") and not known:
                return Verdict(exit_code, line.removeprefix("smprun: "))
        records = [*known, *(record for line in lines if (record := _record(line)))]
        banners = [parse_banner("\n".join(lines)), getattr(self._processes, "banner", None)]
        seen = [banner for banner in banners if isinstance(banner, Banner)]
        return judge(records, seen, exit_code, [os.uname().nodename] * self.num_ranks)


def _launch(launcher: Launcher, num_ranks: int) -> list[str]:
    if launcher in ("smprun", "smprun-fork"):
        package = bootstrap.__name__.rpartition(".")[0]
        return [sys.executable, "-m", package, "-n", str(num_ranks)]
    if launcher == "mpirun":
        line = [command.find_mpirun(), "--host", f"localhost:{num_ranks}", "-n", str(num_ranks)]
        line += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [*line, "--bind-to", "none", sys.executable, "-u"]
    if launcher == "torchrun":
        flags = ["--standalone", f"--nproc-per-node={num_ranks}"]
        return [sys.executable, "-m", "torch.distributed.run", *flags]
    return [sys.executable, "-u"]


def _has_copies(environ: Mapping[str, str]) -> bool:
    """Whether copies can have it: they share a seed of hashes, and lack the threads of imports."""
    one_thread = fork_client.ONE_THREAD.items() <= environ.items()
    return one_thread and environ.get("PYTHONHASHSEED") != "random"


def _environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    asked = {failure.RECORDS_VARIABLE: str(failure.RELAY_SECONDS)}
    merged = {**fork_client.ONE_THREAD, **os.environ, **asked, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _content(descriptor: int) -> str:
    """Returns what is in a file that others write to, whatever their position in it."""
    return Path(f"/proc/self/fd/{descriptor}").read_text(errors="replace")


def _record(line: str) -> failure.FailureRecord | None:
    return failure.FailureRecord.parse(line)


def _is_mark(line: str) -> bool:
    return failure.FailureRecord.num_last_words(line) is not None
