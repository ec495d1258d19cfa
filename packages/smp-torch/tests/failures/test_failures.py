"""The failure matrix: whatever ends one rank ends the job, soon, with a cause on the screen.

Most cells are marked slow; in the others each launcher, each plane, and each way to fail is met: to
die, to stop, to raise and to wait.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from launch_lines import launch_line
from world import PRELOAD, without_fork

from smdistributed.modelparallel.common.testing import Launcher
from smdistributed.modelparallel.common.testing.fork_client import server_with

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

BODY = Path(__file__).parent / "failing_job.py"
#: NCCL takes longer than this to connect for the first time.
TIMEOUT_SECONDS = 15 if torch.cuda.is_available() else 5
BOUND_SECONDS = 10
#: Three processes that import PyTorch, on cores that other tests use as well.
START_SECONDS = 150
FAILURES = ("kill", "stop", "exception", "exit", "system-exit", "deadlock")
LAUNCHERS = ("mpirun", "torchrun", "smprun")
PLANES = ("control", "data")
MATRIX = list(itertools.product(FAILURES, LAUNCHERS, PLANES))
#: Exits are exceptions with a code. Where ranks wait for one that says nothing, those of smprun are
#: copies of a process that has PyTorch.
FEW: set[tuple[str, Launcher, str]] = {
    ("kill", "torchrun", "data"),
    ("stop", "smprun-fork", "data"),
    ("exception", "mpirun", "control"),
    ("deadlock", "smprun-fork", "control"),
}
CAUSES = {
    "kill": ("signal 9", "Signal 9", "SIGKILL", "exitcode: -9", "exitcode  : -9"),
    "stop": ("did not answer", "did not take part", "Timed out"),
    "exception": ("planted failure",),
    "exit": ("sys.exit(7)",),
    "system-exit": (
        "sys.exit(7)",
        "has ended",
        "have ended",
        "has died",
        "exitcode: 7",
        "exitcode  : 7",
    ),
    "deadlock": ("did not answer", "did not take part"),
}


@pytest.fixture(autouse=True)
def files_of_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mpirun has a directory of its own, as smprun gives it one."""
    monkeypatch.setenv("PRTE_MCA_prte_local_tmpdir_base", str(tmp_path))


def is_running(pid: int) -> bool:
    """Whether a process still executes; a stopped or dead one does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends meanwhile
        return False
    return state not in "TtZX"


def started_by(launcher: Launcher) -> list[str]:
    """Returns the words before the script."""
    launcher = without_fork(3, launcher)
    if launcher == "smprun-fork":
        return [*launch_line("smprun", 3), f"--fork-from={server_with(PRELOAD).address}"]
    return launch_line(launcher, 3)


def test_the_few_have_each_failure_launcher_and_plane() -> None:
    every = set(FAILURES) - {"exit", "system-exit"}, set(LAUNCHERS), set(PLANES)
    few = [(failure, launcher.removesuffix("-fork"), plane) for failure, launcher, plane in FEW]
    assert [{cell[kind] for cell in few} for kind in range(3)] == list(every)


@pytest.mark.parametrize(
    ("failure", "launcher", "plane"),
    [
        *sorted(FEW),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MATRIX if cell not in FEW),
    ],
)
def test_all_other_ranks_end(failure: str, launcher: Launcher, plane: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as output_file:
        job = subprocess.Popen(
            [*started_by(launcher), str(BODY), failure, plane, str(tmp_path)],
            stdout=output_file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TIMEOUT_SECONDS": str(TIMEOUT_SECONDS)},
            start_new_session=True,
        )
    try:
        event = wait_for_event(tmp_path, job)
        hangs = failure in ("stop", "deadlock")
        limit = event + (TIMEOUT_SECONDS if hangs else 0) + BOUND_SECONDS
        culprits = {1} if failure != "deadlock" else set()
        others = [int((tmp_path / f"pid{rank}").read_text()) for rank in {0, 1, 2} - culprits]
        while any(is_running(pid) for pid in others) and time.time() < limit:
            time.sleep(0.05)
        ended = time.time() - event
        alive = [pid for pid in others if is_running(pid)]
        # torchrun gives a stopped process 30 s between its two signals; it is no longer needed.
        if failure == "stop" and launcher == "torchrun":
            os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        code = job.wait(60)
    finally:
        end(job, tmp_path)
    output = (tmp_path / "out").read_text()
    print(f"CELL {failure} {launcher} {plane}: {ended:.1f} s, exit code {code}")
    print("\n".join(output.splitlines()[-12:]))
    assert not alive, f"still running {ended:.1f} s after the event\n{output}"
    assert code != 0, output
    if failure == "exit" and launcher != "torchrun":
        assert code == 7
    last_words = "\n".join(output.splitlines()[-40:])
    assert any(cause in last_words for cause in CAUSES[failure]), output
    assert "rank 1" in last_words or "rank      : 1" in last_words, output
    if launcher.startswith("smprun"):
        last = output.splitlines()[-1]
        assert "rank" in last, output
        assert any(cause in last for cause in CAUSES[failure]), output


def wait_for_event(notes: Path, job: subprocess.Popen[bytes]) -> float:
    deadline = time.time() + START_SECONDS
    while time.time() < deadline:
        try:
            return float((notes / "event").read_text())
        except (FileNotFoundError, ValueError):
            time.sleep(0.02)
        if job.poll() is not None:
            break
    raise AssertionError(f"rank 1 never came to its failure\n{(notes / 'out').read_text()}")


def end(job: subprocess.Popen[bytes], notes: Path) -> None:
    for pid in [job.pid, *(int(path.read_text()) for path in notes.glob("pid*"))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()
