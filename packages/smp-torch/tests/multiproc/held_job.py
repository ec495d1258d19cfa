"""A script whose rank 1 holds up the others: in a layer of its second step, then before a barrier.

Usage: held_job.py FOLDER; the layer waits for a file "on" there. Rank 1 says where it waits.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

FOLDER = Path(sys.argv[1])


def hold(name: str) -> None:
    """Waits for a file that has this name."""
    print("waits for", name, flush=True)
    while not (FOLDER / name).exists():
        time.sleep(0.05)


class Layer(nn.Linear):
    is_held = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_held:
            hold("on")
        return super().forward(x)


@smp.step
def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


if __name__ == "__main__":
    placed = {"auto_partition": False, "default_partition": 0}
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **placed})
    first = Layer(4, 4)
    with smp.partition(1):
        second = Layer(4, 4)
    model = smp.DistributedModel(nn.Sequential(first, second))
    train_step(model, torch.ones(4, 4))
    second.is_held = smp.rank() == 1
    train_step(model, torch.ones(4, 4))
    if smp.rank() == 1:
        hold("never")
    smp.barrier()
