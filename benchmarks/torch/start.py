"""How long a job takes from its command line to its first step, and what each process has by then.

Usage: smprun -n 64 benchmarks/torch/start.py, and the same with --no-fork; an even number of ranks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


def private_mib() -> float:
    """Returns the memory that no other process has a part in."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = (line.split() for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    return sum(int(words[1]) for words in found) / 1024


def age_seconds(pid: int) -> float:
    """Returns how long ago a process was started."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


def launcher() -> int:
    """Returns the oldest process above this one that has the name of this script in its words."""
    pid = found = os.getpid()
    while pid > 1:
        if Path(__file__).name in Path(f"/proc/{pid}/cmdline").read_text():
            found = pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


@smp.step
def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One microbatch at a time."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def main() -> None:
    """Takes a step, and prints what it took."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.zero_grad()
    train_step(model, torch.randn(4, 8))
    optimizer.step()
    smp.barrier()
    own = private_mib(), time.process_time()
    memory, cpu = zip(*smp.allgather(own, smp.WORLD), strict=True)
    if smp.rank() == 0:
        print(f"{smp.size()} ranks: the first step is over {age_seconds(launcher()):.1f} s after")
        print(f"the start; at most {max(memory):.0f} MiB of private memory a rank,")
        print(f"{sum(cpu) / len(cpu):.2f} s of CPU a rank")


if __name__ == "__main__":
    main()
