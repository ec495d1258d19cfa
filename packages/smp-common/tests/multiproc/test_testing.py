from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.testing import (
    Launcher,
    RanksFailedError,
    fork_client,
    jobs,
    run_ranks,
)

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked for that copies of a process do not have."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rank_and(value: str) -> tuple[int, str]:
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), value


def add_up() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)


def fail_on_rank_1() -> None:
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
        raise ValueError("boom")
    time.sleep(60)


def pid_and_stop(directory: str) -> None:
    Path(directory, str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def environment() -> tuple[str | None, str | None]:
    return os.environ.get("A"), os.environ.get("B")


WITH_COPIES = pytest.mark.parametrize("launcher", ["smprun", "mpirun", "smprun-fork"])


@WITH_COPIES
def test_results_come_back_by_rank(launcher: Launcher) -> None:
    outcome = run_ranks(2, rank_and, launcher=launcher, timeout=60, args=["x"])
    assert outcome.results == ((0, "x"), (1, "x"))
    assert outcome.exit_code == 0


class Kept:
    """Leaves a folder when it is taken apart, as late as that may be."""

    def __init__(self, path: str) -> None:
        self.leave = functools.partial(os.mkdir, path)

    def __del__(self) -> None:
        self.leave()


def say_goodbye(directory: str) -> None:
    print("goodbye", end="")
    atexit.register(Path(directory, f"handled {os.getpid()}").touch)
    weakref.finalize(add_up, Path(directory, f"finalized {os.getpid()}").touch)
    vars(sys)["kept"] = Kept(f"{directory}/taken apart {os.getpid()}")


@pytest.mark.parametrize("launcher", ["fork", "smprun-fork"])
def test_copies_run_their_exit_handlers_and_end(launcher: Launcher, tmp_path: Path) -> None:
    outcome = run_ranks(2, say_goodbye, launcher=launcher, timeout=60, args=[str(tmp_path)])
    assert outcome.stdout.count("goodbye") == 2
    left = sorted(path.name.rstrip(" 0123456789") for path in tmp_path.iterdir())
    assert left == ["finalized"] * 2 + ["handled"] * 2


def test_copies_do_not_finalize_what_all_of_them_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "copied_with.py"
    module.write_text(
        "import os, weakref\n"
        "def kept(): ...\n"
        f"weakref.finalize(kept, os.mkdir, {str(tmp_path / 'finalized')!r})\n"
        "def prepare():\n"
        f"    weakref.finalize(kept, os.mkdir, {str(tmp_path / 'prepared')!r})\n"
    )
    run_ranks(2, add_up, launcher="fork", timeout=60, preload=(module.stem,))
    assert not (tmp_path / "finalized").exists()
    assert not (tmp_path / "prepared").exists()


def test_a_copy_of_a_process_uses_the_same_server() -> None:
    run_ranks(1, working_folder, launcher="fork", timeout=60)
    server = fork_client.server_with(())
    child = os.fork()
    if child == 0:
        os._exit(int(fork_client.server_with(()) is not server))
    assert os.waitpid(child, 0)[1] == 0


def test_a_server_that_has_left_is_replaced() -> None:
    server = fork_client.RanksServer((), os.environ)
    assert server.is_alive
    server.close()
    assert not server.is_alive


def working_folder() -> str:
    return os.getcwd()


@pytest.mark.parametrize("launcher", ["fork", "smprun-fork"])
def test_copies_work_where_they_were_asked_for(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_ranks(1, working_folder, launcher=launcher, timeout=60)  # from here on there is a server
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, working_folder, launcher=launcher, timeout=60).results == (str(tmp_path),)


@pytest.mark.parametrize("launcher", ["smprun", "smprun-fork"])
def test_ranks_can_talk(launcher: Launcher) -> None:
    assert run_ranks(3, add_up, launcher=launcher, timeout=60).results == (3, 3, 3)


@WITH_COPIES
def test_the_first_failing_ranks_traceback_is_raised(launcher: Launcher) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(2, fail_on_rank_1, launcher=launcher, timeout=60)
    message = str(raised.value)
    assert "exit code 1: rank 1" in message.splitlines()[0]
    assert "in fail_on_rank_1" in message
    assert "ValueError: boom" in message
    assert raised.value.outcome.exit_code == 1


@pytest.mark.parametrize("launcher", ["smprun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_no_process_survives_the_time(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="no end within 10 s"):
        run_ranks(2, pid_and_stop, launcher=launcher, timeout=10, args=[str(tmp_path)])
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_and_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys; print(sys.argv[1:])\n")
    outcome = run_ranks(1, script, launcher="python", timeout=60, args=["a", 1])
    assert outcome.stdout == "['a', '1']\n"
    assert outcome.results == (None,)


def test_variables_are_set_and_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B", "1")
    outcome = run_ranks(1, environment, launcher="python", timeout=60, env={"A": "2", "B": None})
    assert outcome.results == (("2", None),)


def seed_and_threads() -> tuple[int, str | None]:
    return hash("a text"), os.environ.get("OMP_NUM_THREADS")


def test_a_setting_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[Any, ...]:
        return run_ranks(2, seed_and_threads, launcher="smprun-fork", timeout=60).results

    copies = jobs.started["smprun-fork"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    first, second = found()
    assert first[0] != second[0], "copies of one process have one seed"
    assert first[1] == second[1] == "1"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    first, second = found()
    assert first == second == (first[0], "3")
    assert jobs.started["smprun-fork"] == copies, "copies lack the threads of what they import"


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch, which torchrun imports")
def test_torchrun() -> None:
    outcome = run_ranks(2, environment, launcher="torchrun", timeout=100, env={"A": "3"})
    assert outcome.results == (("3", None), ("3", None))


def test_python_starts_one_process() -> None:
    with pytest.raises(ValueError, match="starts one process"):
        run_ranks(2, environment, launcher="python", timeout=60)


def test_a_body_must_be_found_again() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(1, lambda: sys.exit(), timeout=60)
