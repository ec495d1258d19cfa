"""How long saving a checkpoint keeps a GPT from training, by format.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/saving.py --size 1.3b --folder /local/disk

A pipeline with a partition a rank, or ``--shards``; bf16 with fp32 masters and AdamW. Each format
of ``--formats`` is saved ``--repeats`` times while training goes on (``asynchronous=True``), and
once without. Rank 0 prints a line of JSON for each:

- ``blocked_s``: how long the call took, on the slowest rank;
- ``step_ms``: the longest step while files were written; ``plain_step_ms``: a step without;
- ``on_disk_s``: from the call until all was on disk; ``gib``: what that was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, SIZES, loss_of

import smdistributed.modelparallel.torch as smp

#: How each format is asked for; a folder of safetensors has the model alone.
FORMATS: dict[str, dict[str, Any]] = {
    "torch": {},
    "dcp": {"format": "dcp"},
    "safetensors": {"format": "safetensors", "partial": False},
}


@smp.step
def train(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(tokens), targets)
    model.backward(loss)
    return loss


def slowest(seconds: float) -> float:
    """Returns the longest time of any rank. Collective: every rank."""
    return max(smp.allgather(seconds, smp.WORLD))


class Job:
    """A training that can be saved."""

    def __init__(self, options: argparse.Namespace) -> None:
        size = SIZES[options.size]
        self.is_cuda = torch.cuda.is_available()
        device = torch.device("cuda", smp.local_rank()) if self.is_cuda else torch.device("cpu")
        torch.manual_seed(1)
        with device, smp.delay_param_initialization():
            module = GPT(size, size.layers)
        self.model = smp.DistributedModel(module)
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.is_cuda)
        self.optimizer = smp.DistributedOptimizer(adam)
        tokens = torch.randint(size.vocabulary, (options.batch, size.length + 1)).to(device)
        self.batch = tokens[:, :-1], tokens[:, 1:]

    def step(self) -> float:
        """Trains a step; returns how many milliseconds it took."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        train(self.model, *self.batch)
        self.optimizer.step()
        if self.is_cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    def save(self, folder: Path, name: str, *, behind: bool) -> dict[str, float]:
        """Saves once; returns the times. Collective: every rank."""
        wanted = {"optimizer": self.optimizer} if name != "safetensors" else {}
        smp.barrier()
        start = time.perf_counter()
        pending = smp.save_checkpoint(
            folder, name, model=self.model, **wanted, **FORMATS[name], asynchronous=behind
        )
        blocked = slowest(time.perf_counter() - start)
        steps = []
        while pending is not None and not all(smp.allgather(pending.is_written, smp.WORLD)):
            steps.append(self.step())
        if pending is not None:
            pending.wait()
        written = slowest(time.perf_counter() - start)
        return {
            "blocked_s": round(blocked, 2),
            "on_disk_s": round(written, 2),
            "step_ms": round(slowest(max(steps, default=0.0)), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--shards", action="store_true", help="in place of a pipeline")
    parser.add_argument("--folder", type=Path, required=True, help="is made, and removed again")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="trained before")
    options = parser.parse_args()
    kind = "sharded_data_parallel_degree" if options.shards else "pipeline_parallel_degree"
    degree = int(os.environ["WORLD_SIZE"])
    microbatches = 1 if options.shards else options.microbatches
    smp.init({"ddp": True, kind: degree, "microbatches": microbatches, "bf16": True})
    job = Job(options)
    plain = statistics.median([job.step() for _ in range(options.steps)][1:])
    for name in options.formats:
        for behind in [True] * options.repeats + [False]:
            times = job.save(options.folder, name, behind=behind)
            if smp.rank() == 0:
                files = [each for each in options.folder.rglob("*") if each.is_file()]
                gib = sum(each.stat().st_size for each in files) / 2**30
                found = {"format": name, "asynchronous": behind, **times, "gib": round(gib, 2)}
                print(json.dumps({**found, "plain_step_ms": round(plain, 1)}), flush=True)
                shutil.rmtree(options.folder)
            smp.barrier()


if __name__ == "__main__":
    main()
