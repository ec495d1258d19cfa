"""Kills a training job of two processes at random moments, again and again, and resumes it.

The job saves a checkpoint after every step. After each kill the newest checkpoint must be no older
than the last save that had returned, and the losses that follow must be those of an undisturbed
run to the last bit.

    python packages/smp-torch/tests/stress/kill_and_resume.py --kills 200

With ``--asynchronous`` the next step runs while a checkpoint is written.

A fork server has PyTorch loaded, so that a start costs a fraction of a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, LAST_STEP = 8, 120
NUM_RANKS = 2
#: Long enough for a start, some steps and saves, on a busy machine.
DEADLINE_SECONDS = 120


def job(rank: int, port: int, folder: Path, log: Path, saves: bool, asynchronous: bool) -> None:
    """One process of the job; writes what it did to ``log``, line by line."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="stress",
    )
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": NUM_RANKS, "microbatches": 2})
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    first = 0
    with log.open("a", buffering=1) as out:
        if (folder / "newest").exists():
            first = smp.resume_from_checkpoint(folder)
        print("start", first, file=out)
        pending = None
        for step in range(first, LAST_STEP):
            optimizer.zero_grad()
            output = train_step(model, torch.randn(4, WIDTH))
            optimizer.step()
            print("loss", step, [loss.item().hex() for loss in output.outputs], file=out)
            if pending is not None:
                pending.wait()
                print("saved", step, file=out)
            if saves:
                pending = smp.save_checkpoint(
                    folder,
                    step + 1,
                    model=model,
                    optimizer=optimizer,
                    user_content=step + 1,
                    num_kept_partial_checkpoints=2,
                    asynchronous=asynchronous,
                )
                if not asynchronous:
                    print("saved", step + 1, file=out)


class Job:
    """The processes of one start."""

    def __init__(
        self, context: Any, folder: Path, log: Path, *, saves: bool = True, asynchronous: bool
    ) -> None:
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes = [
            context.Process(
                target=job, args=(rank, port, folder, Path(f"{log}.{rank}"), saves, asynchronous)
            )
            for rank in range(NUM_RANKS)
        ]
        for process in self._processes:
            process.start()

    def lines(self, rank: int = 0) -> list[str]:
        """Returns what a process has written; the last line may be torn by a kill."""
        path = Path(f"{self.log}.{rank}")
        text = path.read_text() if path.exists() else ""
        return text.split("\n")[:-1]

    def wait_for(self, number: int) -> None:
        """Waits until rank 0 has written so many lines, or the job has ended."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self.lines()) < number and self.is_alive():
            if time.monotonic() > deadline:
                raise AssertionError(f"no step within {DEADLINE_SECONDS} s: {self.lines()}")
            time.sleep(0.002)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """SIGKILL to every process at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def finish(self) -> None:
        for process in self._processes:
            process.join(DEADLINE_SECONDS)
        codes = [process.exitcode for process in self._processes]
        assert codes == [0] * NUM_RANKS, codes


def check(lines: list[str], curve: list[str], saved: int) -> int:
    """Compares a run with the undisturbed one; returns the last step that it had saved."""
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "start":
            assert int(rest) >= saved, f"resumed at {rest}, but {saved} had been saved"
        elif kind == "loss":
            assert line == curve[int(rest.partition(" ")[0])], f"{line} is not as undisturbed"
        else:
            saved = int(rest)
    return saved


def run(kills: int, seed: int, asynchronous: bool, folder: Path) -> dict[str, int]:
    """Kills and resumes; returns what happened.

    Raises:
        AssertionError: a checkpoint was lost or damaged, or a loss differs in any bit.
    """
    draw = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    # What a first step imports, too.
    preload = ["torch._dynamo", "torch.profiler", "smdistributed.modelparallel.torch", __name__]
    context.set_forkserver_preload(preload)
    undisturbed = Job(
        context, folder / "none", folder / "undisturbed", saves=False, asynchronous=False
    )
    undisturbed.finish()
    curve = undisturbed.lines()[1:]
    assert len(curve) == LAST_STEP
    counts = {"kills": 0, "starts": 0, "resumed steps checked": 0, "killed inside a save": 0}
    checkpoints, saved = folder / "checkpoints", 0
    while True:
        log = folder / f"log{counts['starts']}"
        current = Job(context, checkpoints, log, asynchronous=asynchronous)
        counts["starts"] += 1
        last = counts["kills"] == kills
        # A kill may come at any moment from the start of the processes on.
        current.wait_for(6 if last else draw.choice([0, 0, 1, 2, 4, 8]))
        if not last:
            time.sleep(draw.uniform(0, 0.05))
        current.kill()
        for rank in range(NUM_RANKS):
            lines = current.lines(rank)
            reached = check(lines, curve, saved)
        counts["resumed steps checked"] += sum(line.startswith("loss") for line in lines)
        counts["killed inside a save"] += bool(lines) and lines[-1].startswith("loss")
        saved = max(saved, reached)
        if last:
            assert any(line.startswith("loss") for line in lines), lines
            return counts
        counts["kills"] += 1
        if saved > LAST_STEP - 20:
            shutil.rmtree(checkpoints)
            saved = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="smp-stress-") as folder:
        begin = time.monotonic()
        counts = run(args.kills, args.seed, args.asynchronous, Path(folder))
        print(counts, f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
