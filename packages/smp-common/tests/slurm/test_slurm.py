"""smprun in allocations of a real Slurm: its daemons and two nodes, on the loopback of this host.

Needs root, and ``slurm-wlm`` and ``munge`` of Debian or Ubuntu; ``nox -s slurm`` runs it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

SMPRUN = f"{sys.executable} -m smdistributed.modelparallel.common.launcher"
LIMIT_SECONDS = 60
CONFIGURATION = """
ClusterName=smptest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES State=UP
"""
RANKS = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
nodes = world.gather(os.environ["SLURMD_NODENAME"])
if world.rank == 0:
    print("nodes", *nodes)
"""
FAILS = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 3:
    raise ValueError("planted failure")
MPI.COMM_WORLD.barrier()
"""
SAVES = """
import pathlib, signal, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
def save(*_):
    time.sleep(rank)
    pathlib.Path(f"saved{rank}").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
pathlib.Path(f"ready{rank}").touch()
time.sleep(100)
"""


def run(*words: str) -> str:
    """Runs a command that succeeds; returns what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts Slurm with two nodes, n1 and n2, of two CPUs."""
    missing = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=host, folder=folder, ports=free_ports(3)).lstrip()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(configuration))
        munged = ("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket")
        files = {"pid": "munged.pid", "log": "munged.log", "seed": "munged.seed"}
        try:
            run(*munged, *(f"--{kind}-file={folder}/{name}" for kind, name in files.items()))
            run("slurmctld", "-c")
            for node in ("n1", "n2"):
                run("slurmd", "-N", node)
            idle = ("sinfo", "-h", "-o", "%D", "-t", "idle")
            wait_until(lambda: run(*idle).strip() == "2", "the nodes do not come up")
            yield
        finally:
            subprocess.run(["scancel", "--user=root"], check=False, timeout=20)
            for name in ("slurmd-n1", "slurmd-n2", "slurmctld", "munged"):
                pid = folder / f"{name}.pid"
                if pid.exists():
                    os.kill(int(pid.read_text()), 15)


def submit(folder: Path, script: str, line: str, *options: str) -> tuple[str, str, Path]:
    """Submits a batch job that runs ``smprun``; returns its id, state and output when it ended."""
    job, output = start(folder, script, line, *options)
    wait_until(lambda: state_of(job) not in ("PENDING", "RUNNING", "COMPLETING"), "no end")
    return job, run("scontrol", "show", "job", job), output


def start(folder: Path, script: str, line: str, *options: str) -> tuple[str, Path]:
    (folder / "train.py").write_text(script)
    batch = folder / "job.sh"
    batch.write_text(f"#!/bin/bash\nexport OMP_NUM_THREADS=1\nexec {SMPRUN} {line} train.py\n")
    output = folder / "out"
    words = ("sbatch", "--parsable", f"--chdir={folder}", f"--output={output}", *options)
    return run(*words, str(batch)).strip(), output


def state_of(job: str) -> str:
    return run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()


@pytest.mark.parametrize(
    ("options", "line", "nodes"),
    [
        (("-N2", "--ntasks-per-node=2"), "-n 4", "n1 n1 n2 n2"),
        (("-N2", "--ntasks-per-node=2"), "", "n1 n1 n2 n2"),
        (("-N2", "--ntasks-per-node=2"), "-n 2", "n1 n1"),
        (("-N2", "--ntasks-per-node=1"), "-n 4", "n1 n1 n2 n2"),
        (("-N1", "--ntasks-per-node=1"), "-n 3", "n1 n1 n1"),
        (("-N2", "--ntasks-per-node=1"), "--hosts n2:2,n1:1", "n2 n2 n1"),
    ],
)
def test_ranks_run_where_slurm_allows(
    cluster: None, tmp_path: Path, options: tuple[str, ...], line: str, nodes: str
) -> None:
    _, description, output = submit(tmp_path, RANKS, line, *options)
    assert f"[0] nodes {nodes}\n" in output.read_text()
    assert "ExitCode=0:0" in description


def test_a_failure_on_another_node_ends_the_job(cluster: None, tmp_path: Path) -> None:
    _, description, output = submit(tmp_path, FAILS, "-n 4", "-N2", "--ntasks-per-node=1")
    last = output.read_text().splitlines()[-1]
    assert last.startswith("smprun: rank 3 (")
    assert "ValueError: planted failure" in last
    assert "ExitCode=1:0" in description


def test_ranks_of_all_nodes_save_before_the_end(cluster: None, tmp_path: Path) -> None:
    job, output = start(tmp_path, SAVES, "-n 4", "-N2", "--ntasks-per-node=2")
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 4, "the ranks do not start")
    run("scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: state_of(job) not in ("RUNNING", "COMPLETING"), "no end")
    assert len(list(tmp_path.glob("saved*"))) == 4, output.read_text()
    assert "smprun: ended by SIGTERM (exit code 143)" in output.read_text()
