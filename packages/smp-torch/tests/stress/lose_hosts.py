"""Kills ranks and whole hosts of jobs of ``smprun --restarts``, at random moments.

A job has two hosts, played by network namespaces, and starts again on those that answer. The second
one is lost now and then, and comes back later. In the end

- no attempt began before the last save that had returned;
- each step of each attempt had the samples of that step of an undisturbed run, dealt out to its
  replicas, so no sample of an epoch was seen twice or left out;
- each loss is that of one process without the library, but for rounding (float64): the batch over
  all replicas is the same, since each number of replicas divides it;
- each attempt had as many processes as the hosts that answered allow.

    python packages/smp-torch/tests/stress/lose_hosts.py --kills 20 --only pipeline

It needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elastic_job
import torch
from torch.utils.data import DistributedSampler

from smdistributed.modelparallel.common.launcher import processes
from smdistributed.modelparallel.common.testing.two_hosts import INTERFACE, Hosts, two_hosts

#: Long enough for a start and some steps on a busy machine.
DEADLINE_SECONDS = 150
_VARIABLES = "-x GLOO_SOCKET_IFNAME -x RES_OPTIONS -x TORCH_CPP_LOG_LEVEL -x PYTHONWARNINGS"
#: A job of torchrun, which loses its second host once.
_TORCHRUN = "torchrun"
_RANK = b"OMPI_COMM_WORLD_RANK="


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Attributes:
        slots: processes of both hosts.
        replica: processes of a replica.
        parameters: of the configuration, which smprun has.
        in_script: those that the script gives to smp.init.
    """

    slots: tuple[int, int]
    replica: int
    parameters: tuple[str, ...] = ()
    in_script: str = "{}"


KINDS = {
    "pipeline": Kind((2, 2), 2, ("pipeline_parallel_degree=2",)),
    "three": Kind((4, 2), 2, in_script='{"pipeline_parallel_degree": 2}'),
    "four": Kind((6, 2), 2, ("pipeline_parallel_degree=2",)),
    "owners": Kind((2, 2), 2, ("pipeline_parallel_degree=2", "shard_optimizer_state=true")),
    "shards": Kind((2, 2), 1, ("sharded_data_parallel_degree=4",)),
    "slices": Kind((2, 2), 2, ("tensor_parallel_degree=2",)),
}


def variables(hosts: Hosts) -> dict[str, str]:
    """Returns the environment of what runs on the hosts."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": hosts.addresses[0],
        "GLOO_SOCKET_IFNAME": INTERFACE,
        # Nobody answers for names there.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PATH": os.pathsep.join((str(hosts.agent.parent), os.environ["PATH"])),
    }


def notes_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Returns what a rank has noted; the last line may be torn by a kill."""
    path = folder / f"log.{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Job:
    """A job of smprun."""

    def __init__(self, kind: Kind, hosts: Hosts, folder: Path, restarts: int) -> None:
        self._folder = folder
        self.said: list[str] = []
        self._began = time.monotonic()
        named = ",".join(f"{a}:{n}" for a, n in zip(hosts.addresses, kind.slots, strict=True))
        sets = [word for each in kind.parameters for word in ("--set", each)]
        words = ["--hosts", named, "--mpi-args", f"{hosts.mpi_options} {_VARIABLES}", *sets]
        launcher = [sys.executable, "-m", "smdistributed.modelparallel.common.launcher"]
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", hosts.names[0], *launcher, *words),
                *("--restarts", str(restarts)),
                *(elastic_job.__file__, str(folder), kind.in_script),
            ],
            env=variables(hosts),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(f"{time.monotonic() - self._began:5.0f} s {line}")

    def attempt(self) -> int:
        """Returns how often smprun has said that it starts the job again."""
        return sum("in 2 s" in line for line in list(self.said))

    def notes(self, rank: int = 0) -> list[dict[str, Any]]:
        """See ``notes_of``."""
        return notes_of(self._folder, rank)

    def pids(self) -> list[int]:
        """Returns the processes of ranks that there are now."""
        found = []
        for pid in processes.descendants(self.process.pid):
            with contextlib.suppress(OSError):
                entry = Path(f"/proc/{pid}")
                environ = (entry / "environ").read_bytes().split(b"\0")
                is_rank = os.getpgid(pid) == pid and any(e.startswith(_RANK) for e in environ)
                # What hosts are asked by has a rank, too.
                if is_rank and elastic_job.__file__.encode() in (entry / "cmdline").read_bytes():
                    found.append(pid)
        return found

    def wait_for(self, attempt: int, what: str, count: int) -> None:
        """Waits until rank 0 has noted something so often in an attempt."""
        deadline = time.monotonic() + DEADLINE_SECONDS

        def noted() -> int:
            return sum(n["attempt"] == attempt and n["what"] == what for n in self.notes())

        while self.process.poll() is None and noted() < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {DEADLINE_SECONDS} s: {self.said[-20:]}")
            time.sleep(0.005)

    def wait_for_attempt(self, attempt: int, allowed: int) -> None:
        """Waits until smprun starts the job again, or it runs with so many processes or fewer.

        A host that is lost before it was asked has the attempt begin without it.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS

        def runs() -> bool:
            starts = (note for note in self.notes() if note["what"] == "start")
            return any(n["attempt"] == attempt - 1 and n["size"] <= allowed for n in starts)

        while self.process.poll() is None and self.attempt() < attempt and not runs():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not started again within {DEADLINE_SECONDS} s: {self.said[-20:]}"
                )
            time.sleep(0.02)

    def finish(self) -> None:
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join()
        assert code == 0, "".join(self.said)


def kill(job: Job, kind: Kind, hosts: Hosts, draw: random.Random, counts: Counter[str]) -> None:
    """Kills something of the attempt that runs, at a random moment of it."""
    attempt = job.attempt()
    moment = draw.choice(("start", "step", "save"))
    if moment == "start":
        time.sleep(draw.uniform(0, 6))
    else:
        what = {"step": "loss", "save": "saving"}[moment]
        job.wait_for(attempt, what, draw.randint(1, 4))
        time.sleep(draw.uniform(0, 0.05 if moment == "step" else 0.02))
    what = draw.choice(("rank", "ranks", "host"))
    if what == "host" and hosts.down.exists():
        what = "rank"
    if hosts.down.exists() and draw.random() < 0.7:
        hosts.down.unlink()
        counts["host comes back"] += 1
    if what == "host":
        hosts.lose_second()
    else:
        while not (pids := job.pids()):
            assert job.process.poll() is None, "".join(job.said)
            time.sleep(0.02)
        for pid in draw.sample(pids, min(len(pids), 1 + (what == "ranks"))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    counts[f"{what} at a {moment}"] += 1
    job.wait_for_attempt(attempt + 1, kind.slots[0] if what == "host" else 0)


def undisturbed(num_steps: int) -> tuple[list[float], list[list[int]]]:
    """Trains in one process without the library; returns losses and samples of each step."""
    data, model = elastic_job.samples(), elastic_job.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=elastic_job.LEARNING_RATE)
    sampler: Any = DistributedSampler(range(elastic_job.SIZE), 1, 0, seed=3)  # type: ignore[arg-type]
    losses, batches = [], []
    for step in range(num_steps):
        epoch, place = divmod(step, elastic_job.STEPS_AN_EPOCH)
        sampler.set_epoch(epoch)
        first = place * elastic_job.GLOBAL_BATCH
        batch = list(sampler)[first : first + elastic_job.GLOBAL_BATCH]
        optimizer.zero_grad()
        loss = elastic_job.error(model(data[batch]), data[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        batches.append(batch)
    return losses, batches


def check(notes: Sequence[Sequence[dict[str, Any]]], kind: Kind) -> Counter[str]:
    """Compares all attempts with an undisturbed run.

    Args:
        notes: of each rank.
        kind: of the job.

    Raises:
        AssertionError: something was lost, seen twice, or other than undisturbed.
    """
    everything = [note for rank in notes for note in rank]
    losses, batches = undisturbed(max(note["step"] for note in everything))
    allowed = {sum(kind.slots), kind.slots[0] // kind.replica * kind.replica}
    starts: dict[int, tuple[int, int]] = {}
    steps: defaultdict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
    last_saved: dict[int, int] = {}
    for note in everything:
        attempt = note["attempt"]
        if note["what"] == "start":
            begun = starts.setdefault(attempt, (note["step"], note["size"]))
            assert begun == (note["step"], note["size"])
            assert note["size"] in allowed, note
        elif note["what"] == "saved":
            last_saved[attempt] = max(last_saved.get(attempt, 0), note["step"])
        elif note["what"] == "loss":
            steps[attempt, note["step"]][note["of"]] = note
    for attempt, (first, _) in starts.items():
        before = max((step for a, step in last_saved.items() if a < attempt), default=0)
        assert first >= before, f"attempt {attempt} began at {first}, {before} had been saved"
    counts: Counter[str] = Counter()
    for (attempt, step), replicas in steps.items():
        num_replicas = elastic_job.GLOBAL_BATCH // len(next(iter(replicas.values()))["indices"])
        for replica, note in replicas.items():
            assert note["indices"] == batches[step - 1][replica::num_replicas], note
        counts["batches compared"] += len(replicas)
        if len(replicas) == num_replicas:
            mean = sum(note["loss"] for note in replicas.values()) / num_replicas
            assert math.isclose(mean, losses[step - 1], rel_tol=1e-9), (attempt, step, mean)
            counts["losses compared"] += 1
    counts["steps"] = len(losses)
    counts["attempts that stepped"] = len({attempt for attempt, _ in steps})
    for _, size in starts.values():
        counts[f"starts with {size} processes"] += 1
    return counts


def run(name: str, kills: int, seed: int, folder: Path) -> Counter[str]:
    """Kills and lets the job end; returns what happened."""
    kind, draw = KINDS[name], random.Random(f"{name} {seed}")
    counts: Counter[str] = Counter()
    with two_hosts(folder) as hosts:
        job = Job(kind, hosts, folder, restarts=2 * kills + 1)
        try:
            for _ in range(kills):
                kill(job, kind, hosts, draw, counts)
                if job.process.poll() is not None:
                    break
            if job.process.poll() is None:
                job.wait_for(job.attempt(), "saved", 2)
                (folder / "stop").touch()
            job.finish()
        finally:
            job.process.terminate()
            job.process.wait()
        counts["restarts"] = job.attempt()
        counts += check([job.notes(rank) for rank in range(sum(kind.slots))], kind)
        for line in job.said:
            if "smprun: " in line:
                print("   ", line, end="")
    return counts


def run_torchrun(folder: Path) -> Counter[str]:
    """Loses the second host of a job of ``torchrun --nnodes 1:2`` once; returns what happened."""

    def wait_for_saves(attempts: range, agent: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (
            sum(n["what"] == "saved" and n["attempt"] in attempts for n in notes_of(folder, 0)) < 3
        ):
            assert agent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with two_hosts(folder) as hosts, contextlib.ExitStack() as stack:
        environ = {**variables(hosts), "SM_HP_MP_PARAMETERS": '{"pipeline_parallel_degree": 2}'}
        agents = []
        for name, address, is_host in zip(hosts.names, hosts.addresses, (1, 0), strict=True):
            words = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            words += ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.addresses[0]}:29500"]
            words += ["--rdzv-conf", f"last_call_timeout=3,is_host={is_host}"]
            words += ["--local-addr", address, elastic_job.__file__, str(folder), "{}"]
            agents.append(subprocess.Popen(words, env=environ, stderr=subprocess.DEVNULL))
            stack.callback(agents[-1].wait)
            stack.callback(agents[-1].kill)
        wait_for_saves(range(1), agents[0])
        hosts.lose_second()
        wait_for_saves(range(1, 4), agents[0])
        (folder / "stop").touch()
        assert agents[0].wait(DEADLINE_SECONDS) == 0
    kind = KINDS["pipeline"]
    return check([notes_of(folder, rank) for rank in range(sum(kind.slots))], kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*KINDS, _TORCHRUN])
    args = parser.parse_args()
    for name in [args.only] if args.only else [*KINDS, _TORCHRUN]:
        with tempfile.TemporaryDirectory(prefix="smp-lost-") as folder:
            begin = time.monotonic()
            if name == _TORCHRUN:
                counts = run_torchrun(Path(folder))
            else:
                counts = run(name, args.kills, args.seed, Path(folder))
            print(name, dict(counts), f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
