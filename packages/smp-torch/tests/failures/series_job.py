"""A small training job in which one rank fails in a given way, at a given place.

Usage: series_job.py FAULT RANK PLACE. One process of two or four fails in its third step; four are
two replicas of two partitions.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

FAULT, RANK, PLACE = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def _raise() -> None:
    raise ValueError("planted failure")


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exception": _raise,
    "exit": lambda: sys.exit(7),
    "silent-exit": lambda: os._exit(0),
}


def fail_at(place: str, step: int) -> None:
    if place == PLACE and step == 2 and smp.rank() == RANK:
        FAULTS[FAULT]()


smp.init(
    {
        "pipeline_parallel_degree": 2,
        "microbatches": 2,
        "ddp": True,
        "communication_timeout": 5,
    }
)
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
scaler = smp.amp.GradScaler()


@smp.step
def train(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(scaler.scale(loss))
    return loss


for step in range(20):
    optimizer.zero_grad()
    fail_at("step", step)
    train(model, torch.randn(8, 32))
    fail_at("update", step)
    scaler.step(optimizer)
    scaler.update()
    fail_at("objects", step)
    smp.barrier()
