"""A real Slurm for tests: its daemons and two nodes, on the loopback of this host.

Needs root, and ``slurm-wlm`` and ``munge`` of Debian or Ubuntu.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

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


def state_of(job: str) -> str:
    return run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()
