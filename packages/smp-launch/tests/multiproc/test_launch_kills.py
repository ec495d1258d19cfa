"""Whatever is killed, and whenever: a job ends, says why, and leaves nothing running."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
from job_bench import folder_of, make, processes_of, wait_until

from smdistributed.modelparallel.common.launcher.processes import descendants
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(500)]

#: Ends by itself, so that a job goes well where what is killed was not needed.
PLAIN = """
import pathlib, os, time
pathlib.Path(os.environ["SM_MODEL_DIR"], "ready").touch()
time.sleep(1.5)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + PLAIN
#: The same with a child that went its own way.
DETACHED = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)" + PLAIN
RANKS = """
from mpi4py import MPI
import time
for _ in range(15):
    MPI.COMM_WORLD.barrier()
    time.sleep(0.1)
"""
KINDS = {"plain": (PLAIN, 0), "deaf": (DEAF, 0), "detached": (DETACHED, 0), "ranks": (RANKS, 2)}
BATCH = 10


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def supervisor_of(job: JobFolder) -> int | None:
    for pid in processes_of(job.path):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if any(word.endswith("job.supervisor") for word in words):
            return pid
    return None


def kill_one(session: Session, seed: int) -> str:
    """Starts a job, kills one of its processes at some time; returns what became of both."""
    draw = random.Random(seed)
    kind = draw.choice(sorted(KINDS))
    script, ranks = KINDS[kind]
    estimator = make(session, script, ranks=ranks)
    estimator.fit(wait=False)
    job = folder_of(estimator)
    time.sleep(draw.uniform(0, 4 if ranks else 2))
    victim, family = "nobody", set()
    if pid := supervisor_of(job):
        family = {pid, *descendants(pid)}
        chosen = pid if draw.random() < 0.4 else draw.choice(sorted(family))
        victim = "supervisor" if chosen == pid else "another"
        os.kill(chosen, signal.SIGKILL)
    wait_until(lambda: session.observe(job).is_final, f"seed {seed}: in progress for ever")
    wait_until(
        lambda: not any(map(is_alive, family)) and not processes_of(job.path),
        f"seed {seed} ({kind}, {victim}): processes are left",
    )
    status = session.observe(job)
    assert (status.training_job_status == "Failed") is bool(status.failure_reason)
    assert job.status() == status
    return f"{kind}, {victim}: {status.training_job_status}"


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_a_hundred_random_kills(
    session: Session, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setenv("SMP_STOP_GRACE_SECONDS", "1")
    num_kills = 0
    for seed in itertools.count(1000 * batch):
        said = kill_one(session, seed)
        print(seed, said, flush=True)
        # A job that ended before anybody killed anything does not count.
        num_kills += "nobody" not in said
        if num_kills == BATCH:
            break


def test_a_deaf_script_does_not_outlive_its_supervisor(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_STOP_GRACE_SECONDS", "0.5")
    estimator = make(session, DEAF.replace("1.5", "1000"))
    estimator.fit(wait=False)
    job = folder_of(estimator)
    wait_until(lambda: (job.model / "ready").exists(), "the script does not start")
    supervisor = supervisor_of(job)
    assert supervisor is not None
    family = descendants(supervisor)
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, family)), "the script goes on")
    assert session.observe(job).training_job_status == "Failed"
