"""A job of three ranks in which rank 1 fails in a given way while its peers wait for it.

Usage: failing_job.py FAILURE PLANE NOTES, where NOTES is a folder in which each rank leaves its
process id, and rank 1 the time of its failure.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

FAILURE, PLANE, NOTES = sys.argv[1], sys.argv[2], Path(sys.argv[3])
TIMEOUT_SECONDS = float(os.environ["TIMEOUT_SECONDS"])


def fail():
    (NOTES / "event").write_text(str(time.time()))
    if FAILURE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAILURE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAILURE == "exception":
        raise ValueError("planted failure")
    elif FAILURE == "exit":
        sys.exit(7)
    elif FAILURE == "system-exit":
        raise SystemExit(7)  # unlike sys.exit, it cannot be seen coming
    elif FAILURE == "deadlock":
        smp.recv_from(0, smp.RankType.WORLD_RANK)
    else:
        raise SystemExit(f"unknown failure {FAILURE}")


class Bomb(nn.Module):
    """Passes its input on; fails on rank 1 once it is armed.

    By the environment: a change of Python state would record the step again, and fail there.
    """

    def forward(self, x):
        if "BOMB_IS_ARMED" in os.environ and smp.rank() == 1:
            fail()
        return x * 1.0


def train_until_failure():
    layers = [nn.Linear(64, 64), nn.Linear(64, 64), Bomb(), nn.Linear(64, 64), nn.Linear(64, 64)]
    net = nn.Sequential(*layers)
    for partition, layer in zip((0, 1, 1, 2, 2), layers, strict=True):
        smp.set_partition(layer, partition)
    model = smp.DistributedModel(net)

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", smp.local_rank()) if on_gpu else torch.device("cpu")
    for iteration in range(1000):
        if iteration == 3:
            os.environ["BOMB_IS_ARMED"] = "1"
        train(model, torch.randn(8, 64, device=device))


def talk_until_failure():
    smp.barrier()
    if smp.rank() == 1:
        fail()
    if smp.rank() == 0:
        smp.recv_from(1, smp.RankType.WORLD_RANK)
    smp.barrier()


smp.init(
    {
        "pipeline_parallel_degree": 3,
        "microbatches": 4,
        "communication_timeout": TIMEOUT_SECONDS,
        "auto_partition": False,
        "default_partition": 0,
    }
)
(NOTES / f"pid{smp.rank()}").write_text(str(os.getpid()))
torch.manual_seed(0)
train_until_failure() if PLANE == "data" else talk_until_failure()
