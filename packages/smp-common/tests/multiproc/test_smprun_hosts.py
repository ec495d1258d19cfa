"""``smprun`` on two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.testing.two_hosts import Hosts, NoHostsError, two_hosts

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

LIMIT_SECONDS = 60


def smprun(hosts: Hosts, words: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    first, second = hosts.addresses
    launcher = ["-m", "smdistributed.modelparallel.common.launcher"]
    own = ["-n", "4", "--hosts", f"{first}:2,{second}:2", "--mpi-args", hosts.mpi_options]
    return hosts.run([sys.executable, *launcher, *own, *words], directory, LIMIT_SECONDS)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    try:
        with two_hosts(tmp_path) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


def test_ranks_are_spread_over_the_hosts(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 5\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, socket, subprocess, sys, helper\n"
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "local = os.environ['OMPI_COMM_WORLD_LOCAL_RANK']\n"
        "total = world.allreduce(world.rank)\n"
        "print(socket.gethostname(), local, total, os.environ['SM_HP_MP_PARAMETERS'],\n"
        "      os.environ['SMP_X'], sys.argv[1:])\n"
        "if world.rank == 0:\n"
        "    words = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()\n"
        "    launcher = 'smdistributed.modelparallel.common.launcher'\n"
        "    asked = [sys.executable, '-m', launcher, '--status', words[1]]\n"
        "    subprocess.run(asked, check=True, stdout=sys.stderr)\n"
        "world.barrier()\n"
    )
    words = ["--set", "ddp=True", "--mpi-args", "-x SMP_X=1", str(script), "a b"]
    done = smprun(hosts, words, tmp_path)
    assert done.returncode == 0, done.stderr
    here, there = os.uname().nodename, hosts.names[1]
    at = "train.py:13 in <module>: world.barrier()"
    told = [line[4:] for line in done.stderr.splitlines() if line.startswith("[0] ")]
    assert told[0].startswith(f"rank 0 ({here}): "), done.stderr
    assert told[1] == f"ranks 1-3 ({here}, {there}): {at}"
    rest = "6 {\"ddp\": true} 1 ['a b']"
    assert sorted(done.stdout.splitlines()) == [
        f"[0] {here} 0 {rest}",
        f"[1] {here} 1 {rest}",
        f"[2] {there} 0 {rest}",
        f"[3] {there} 1 {rest}",
    ]


@pytest.mark.parametrize(
    ("end", "code", "cause"),
    [
        ("raise ValueError('boom')", 1, "failed first: ValueError: boom (exit code 1)"),
        pytest.param(
            *("sys.exit(7)", 7, "failed first: sys.exit(7) (exit code 7)"),
            marks=pytest.mark.slow,  # the code of an exception comes by the same way
        ),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_failure_on_the_other_host_ends_everything(
    hosts: Hosts, tmp_path: Path, end: str, code: int, cause: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        f"open(f'{tmp_path}/pid.{{os.getpid()}}', 'w')\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.barrier()\n"
        f"if MPI.COMM_WORLD.rank == 3:\n    {end}\n"
        "MPI.COMM_WORLD.recv(source=3)\n"
    )
    started = time.monotonic()
    done = smprun(hosts, [str(script)], tmp_path)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - started < 25
    last = done.stderr.splitlines()[-1]
    assert last.startswith("smprun: rank 3 (")
    assert last.endswith(cause)
    if "raise" in end:
        assert f'[3]   File "{script}", line 6, in <module>' in done.stderr
    pids = [path.suffix[1:] for path in tmp_path.glob("pid.*")]
    assert len(pids) == 4
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_a_host_that_cannot_be_reached(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    hosts.agent.write_text("#!/bin/sh\nexit 255\n")
    done = smprun(hosts, [str(script)], tmp_path)
    assert done.returncode != 0
    assert hosts.addresses[1] in done.stdout + done.stderr  # mpirun explains
    lost = f"smprun: host {hosts.addresses[1]} was lost: mpirun cannot reach it (exit code 255)"
    assert done.stderr.splitlines()[-1] == lost


def test_a_job_starts_again_on_the_hosts_that_answer(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "from mpi4py import MPI\n"
        "from pathlib import Path\n"
        "world = MPI.COMM_WORLD\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt, os.environ['SM_HP_MP_PARAMETERS'][-3:], flush=True)\n"
        "world.barrier()\n"
        f"down = Path({str(hosts.down)!r})\n"
        "if world.rank == world.size - 1 and attempt != '3':\n"
        "    if attempt == '1':\n"
        "        down.touch()\n"
        "    elif attempt == '2':\n"
        "        down.unlink()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(0.5)  # mpirun hands on what was printed\n"
        "    os.kill(os.getppid(), signal.SIGKILL)  # what mpirun has started there\n"
        "world.barrier()\n"
    )
    degrees = ["ddp=true", "tensor_parallel_degree=2", "sharded_data_parallel_degree=2"]
    sets = [word for each in degrees for word in ("--set", each)]
    done = smprun(hosts, ["--restarts", "3", *sets, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = sorted(
        f"[{rank}] attempt {attempt} {degree}}}"
        for attempt, (size, degree) in enumerate([(4, " 2"), (4, " 2"), (2, " 1"), (4, " 2")])
        for rank in range(size)
    )
    assert sorted(done.stdout.splitlines()) == shown
    lost = f"smprun: host {hosts.names[1]} was lost: mpirun cannot reach it (exit code 1)"
    second = f"host {hosts.addresses[1]} is"
    here = os.uname().nodename
    # Open MPI warns now and then that a process was faster than what it sets for it.
    told = [line for line in done.stderr.splitlines() if "plm:ssh: Warning: setpgid" not in line]
    assert told == [
        lost,
        "smprun: restart 1 of 3 in 2 s",
        lost,
        "smprun: restart 2 of 3 in 2 s",
        f"smprun: restart 2 of 3: {second} gone; 2 of 4 processes, data_parallel 1, "
        "sharded_data_parallel_degree 1",
        f"smprun: rank 1 ({here}) was killed by signal 9 (SIGKILL)",
        "smprun: restart 3 of 3 in 2 s",
        f"smprun: restart 3 of 3: {second} back; 4 of 4 processes, data_parallel 2",
    ]
