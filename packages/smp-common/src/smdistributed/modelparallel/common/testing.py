"""``run_ranks``: runs a test's body on several real processes and brings the results back."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from smdistributed.modelparallel.common import failure
from smdistributed.modelparallel.common.launcher import bootstrap, command, processes
from smdistributed.modelparallel.common.launcher.first_failure import Verdict, judge, parse_banner

Launcher = Literal["smprun", "mpirun", "torchrun", "python"]
Body = Callable[..., object] | str | os.PathLike[str]

_GRACE_SECONDS = 3.0
_SHOWN_LINES = 60


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
) -> Outcome:
    """Runs ``body`` on every rank of a new job and waits for its end.

    Args:
        num_ranks: number of processes; 1 for launcher ``python``.
        body: path of a script, or a function at the top level of a module: it is found again by
            the module's file and its name.
        launcher: what starts the processes.
        timeout: seconds after which the job is killed.
        env: variables to set, or to unset where the value is None.
        args: arguments of the function (pickled), or of the script (as text).

    Raises:
        RanksFailedError: a process failed, or the job did not end in time.
    """
    if launcher == "python" and num_ranks != 1:
        raise ValueError(f"launcher 'python' starts one process; received num_ranks {num_ranks}.")
    with tempfile.TemporaryDirectory(prefix="smp-ranks-") as directory:
        program = _program(body, args, Path(directory))
        started = time.monotonic()
        exit_code, stdout, stderr, in_time = _run(
            [*_launch(launcher, num_ranks), *program], _environment(env), timeout
        )
        seconds = time.monotonic() - started
        results = tuple(_result(Path(directory), rank) for rank in range(num_ranks))
        shown = "\n".join(line for line in stderr.splitlines() if not _record(line))
        outcome = Outcome(results, exit_code, stdout, shown, seconds)
        if not in_time:
            raise RanksFailedError(f"no end within {timeout:g} s:\n{_tail(shown)}", outcome)
        if exit_code:
            verdict = _judge(exit_code, stderr, num_ranks)
            details = _tail(shown)
            if verdict.traceback_rank is not None:
                with contextlib.suppress(FileNotFoundError):
                    details = Path(directory, f"traceback.{verdict.traceback_rank}").read_text()
            raise RanksFailedError(f"exit code {exit_code}: {verdict.line}\n{details}", outcome)
        return outcome


def _launch(launcher: Launcher, num_ranks: int) -> list[str]:
    if launcher == "smprun":
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


def _program(body: Body, args: Sequence[object], directory: Path) -> list[str]:
    if not callable(body):
        return [os.fspath(body), *map(str, args)]
    if body.__qualname__ != body.__name__:
        raise ValueError(
            f"a body must be a function at the top level of its module; received "
            f"{body.__qualname__}: move it out of its class or function."
        )
    call = (inspect.getfile(body), body.__module__, body.__name__, tuple(args))
    (directory / "call").write_bytes(pickle.dumps(call))
    # A copy, since every launcher takes the path of a script: it only calls back into here.
    script = directory / "body.py"
    script.write_text(f"from {__name__} import run_body\n\nrun_body({str(directory)!r})\n")
    return [str(script)]


def run_body(directory: str) -> None:
    """Calls the function that ``run_ranks`` left in ``directory``; runs on each rank."""
    rank = bootstrap.rank()
    with failure.guarded(lambda: rank):
        path, module_name, name, args = pickle.loads(Path(directory, "call").read_bytes())
        try:
            result = getattr(_import(path, module_name), name)(*args)
        except Exception:
            Path(directory, f"traceback.{rank}").write_text(traceback.format_exc())
            raise
        Path(directory, f"result.{rank}").write_bytes(pickle.dumps(result))


def _import(path: str, name: str) -> ModuleType:
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _result(directory: Path, rank: int) -> Any:
    with contextlib.suppress(FileNotFoundError):
        return pickle.loads((directory / f"result.{rank}").read_bytes())
    return None


def _environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    merged = {**os.environ, failure.RECORDS_VARIABLE: "1", "OMP_NUM_THREADS": "1", **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _run(
    line: Sequence[str], environ: Mapping[str, str], timeout: float
) -> tuple[int, str, str, bool]:
    """Runs a command in a process group of its own; no process of it is left afterwards."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
        command.own_files(environ) as complete,
    ):
        process = subprocess.Popen(
            line, env=complete, stdout=out, stderr=err, start_new_session=True
        )
        in_time = True
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            _end(process)
        out.seek(0)
        err.seek(0)
        return process.returncode, out.read(), err.read(), in_time


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        below = processes.descendants(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        for pid in below | processes.descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge(exit_code: int, stderr: str, num_ranks: int) -> Verdict:
    lines = stderr.splitlines()
    for line in reversed(lines):
        if line.startswith("smprun: "):  # which has judged, and shown the traceback last
            return Verdict(exit_code, line.removeprefix("smprun: "))
    records = [record for line in lines if (record := _record(line))]
    banner = parse_banner(stderr)
    hosts = [os.uname().nodename] * num_ranks
    return judge(records, [banner] if banner else [], exit_code, hosts)


def _record(line: str) -> failure.FailureRecord | None:
    return failure.FailureRecord.parse(line)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_SHOWN_LINES:])
