"""smprun in allocations of a real Slurm.

Needs root, and ``slurm-wlm`` and ``munge`` of Debian or Ubuntu; ``nox -s long -- slurm`` runs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from slurm_cluster import cluster, run, state_of, wait_until

__all__ = ["cluster"]

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

EXAMPLE = Path(__file__).parents[4] / "examples/torch/fine_tune.py"
SMPRUN = f"{sys.executable} -m smdistributed.modelparallel.common.launcher"
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


GOES_ON = """
import os, pathlib, time
from mpi4py import MPI
world = MPI.COMM_WORLD
print("one of", world.size, flush=True)
pathlib.Path(f"ready{world.rank}").write_text(f"{os.getpid()} {os.getppid()}")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(100)
"""


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


def test_an_example_trains_over_two_nodes(cluster: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="for the example that fine-tunes a model")
    folder = tmp_path / "runs"
    words = f"--steps 6 --batch 8 --length 16 --folder {folder}"
    batch = tmp_path / "job.sh"
    batch.write_text(f"#!/bin/bash\nexport OMP_NUM_THREADS=1\nexec {SMPRUN} {EXAMPLE} {words}\n")
    output = tmp_path / "out"
    options = ("-N2", "--ntasks-per-node=1", f"--chdir={tmp_path}", f"--output={output}")
    job = run("sbatch", "--parsable", *options, str(batch)).strip()
    wait_until(lambda: state_of(job) not in ("PENDING", "RUNNING", "COMPLETING"), "no end")
    assert "[0] step 6/6  loss 6.7" in output.read_text()
    assert (folder / "output" / "model.safetensors").exists()


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


def test_a_job_goes_on_with_the_nodes_that_are_left(cluster: None, tmp_path: Path) -> None:
    options = ("-N2", "--ntasks-per-node=2", "--no-kill")
    job, output = start(tmp_path, GOES_ON, "--restarts 1 --set ddp=true", *options)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 4, "the ranks do not start")
    try:
        daemon = Path(os.environ["SLURM_CONF"]).with_name("slurmd-n2.pid")
        notes = [daemon, *(tmp_path / f"ready{rank}" for rank in (2, 3))]
        for note in notes:
            for pid in note.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
        wait_until(lambda: state_of(job) not in ("RUNNING", "COMPLETING"), "no end")
    finally:
        run("slurmd", "-N", "n2")
        wait_until(lambda: run("sinfo", "-h", "-o", "%D", "-t", "idle").strip() == "2", "no node")
    lines = output.read_text().splitlines()
    assert "smprun: restart 1 of 1: host n2 is gone; 2 of 4 processes, data_parallel 2" in lines
    assert (
        sorted(line[4:] for line in lines if "one of" in line)
        == ["one of 2"] * 2 + ["one of 4"] * 4
    )
    assert "ExitCode=0:0" in run("scontrol", "show", "job", job)
