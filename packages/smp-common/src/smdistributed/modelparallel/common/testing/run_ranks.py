"""``run_ranks``: runs a test's body on several new processes and brings the results back."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common import failure
from smdistributed.modelparallel.common.launcher import bootstrap
from smdistributed.modelparallel.common.testing.calls import Call
from smdistributed.modelparallel.common.testing.jobs import Job, Launcher

Body = Callable[..., object] | str | os.PathLike[str]


@dataclass(frozen=True)
class Outcome:
    """What a job did.

    Attributes:
        results: what a function body returned on each rank; None for a script.
        exit_code: of the launcher.
        stdout: its standard output.
        stderr: its standard error, without failure records.
        seconds: how long it ran.
    """

    results: tuple[Any, ...]
    exit_code: int
    stdout: str
    stderr: str
    seconds: float


class RanksFailedError(AssertionError):
    """A rank failed or the time was up; the message holds the first failing rank's traceback.

    Attributes:
        outcome: what is known of the job.
    """

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


def run_ranks(
    num_ranks: int,
    body: Body,
    *,
    launcher: Launcher = "smprun",
    timeout: float,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[object] = (),
    preload: Sequence[str] = (),
) -> Outcome:
    """Runs ``body`` on every rank of a new job and waits for its end.

    Args:
        num_ranks: number of processes; 1 for launcher ``python``.
        body: path of a script, or a function at the top level of a module: it is found again by
            the module's file and its name.
        launcher: what starts the processes; ``fork`` stands for torchrun (for ``python`` if there
            is one) and starts in a fraction of a second, see ``fork_server``; ``smprun-fork`` is
            smprun with ranks that start so.
        timeout: seconds after which the job is killed.
        env: variables to set, or to unset where the value is None.
        args: arguments of the function (pickled), or of the script (as text).
        preload: modules that processes of launchers ``fork`` and ``smprun-fork`` have from their
            beginning.

    Raises:
        RanksFailedError: a process failed, or the job did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="smp-ranks-") as directory:
        program = _program(body, args, Path(directory))
        begin = time.monotonic()
        job = Job(launcher, num_ranks, program, env, preload)
        with contextlib.closing(job):
            in_time = job.has_ended(timeout)
            job.end()
            seconds = time.monotonic() - begin
            results = tuple(_result(Path(directory), rank) for rank in range(num_ranks))
            exit_code = job.exit_code or 0
            outcome = Outcome(results, exit_code, job.stdout(), job.stderr(), seconds)
            if not in_time:
                message = f"no end within {timeout:g} s:\n{job.last_lines()}"
                raise RanksFailedError(message, outcome)
            if exit_code:
                raise RanksFailedError(_explanation(job, Path(directory)), outcome)
        return outcome


def _explanation(job: Job, directory: Path) -> str:
    """Returns who failed first, with its traceback if it left one."""
    verdict = job.verdict()
    details = job.last_lines()
    if verdict.traceback_rank is not None:
        with contextlib.suppress(FileNotFoundError):
            details = (directory / f"traceback.{verdict.traceback_rank}").read_text()
    return f"exit code {job.exit_code}: {verdict.line}\n{details}"


def _program(body: Body, args: Sequence[object], directory: Path) -> list[str]:
    if not callable(body):
        return [os.fspath(body), *map(str, args)]
    (directory / "call").write_bytes(pickle.dumps(Call.to(body, args)))
    # Every launcher takes the path of a script: it only calls back into here.
    script = directory / "body.py"
    script.write_text(f"from {__name__} import run_body\n\nrun_body({str(directory)!r})\n")
    return [str(script)]


def run_body(directory: str) -> None:
    """Calls the function that ``run_ranks`` left in ``directory``; runs on each rank."""
    rank = bootstrap.rank()
    with failure.guarded(lambda: rank):
        call = pickle.loads(Path(directory, "call").read_bytes())
        try:
            result = call()
        except Exception:
            _leave(Path(directory, f"traceback.{rank}"), traceback.format_exc().encode())
            raise
        _leave(Path(directory, f"result.{rank}"), pickle.dumps(result))


def _leave(path: Path, content: bytes) -> None:
    """Writes a file that is whole or absent: a job may be killed while its ranks write."""
    aside = path.with_name(f"{path.name}.aside")
    aside.write_bytes(content)
    aside.replace(path)


def _result(directory: Path, rank: int) -> Any:
    with contextlib.suppress(FileNotFoundError):
        return pickle.loads((directory / f"result.{rank}").read_bytes())
    return None
