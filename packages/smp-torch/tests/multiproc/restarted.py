"""A script that goes on from its newest checkpoint, and loses rank 1 in the middle of two attempts.

Usage: restarted.py FOLDER [STEP ...]; in attempt i the i-th step is the last of rank 1.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from small_nets import WIDTH, DropoutNet
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

STEPS, STEPS_A_SAVE = 9, 2


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), x.roll(1, 1))
    model.backward(loss)
    return loss


def train(folder: str, last: int) -> dict[int, list[str]]:
    """Trains to the end, or to the last step of rank 1; returns the losses of each step."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "communication_timeout": 30})
    torch.manual_seed(0)
    model = smp.DistributedModel(DropoutNet())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    first = 0
    if Path(folder, "newest").exists():
        first = smp.resume_from_checkpoint(folder)["step"]
    losses = {}
    for step in range(first + 1, STEPS + 1):
        if step == last and smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        output = train_step(model, torch.randn(8, WIDTH))
        optimizer.step()
        losses[step] = [loss.item().hex() for loss in output.outputs]
        if smp.rank() == 0:
            print("step", step, *losses[step], flush=True)
        if step % STEPS_A_SAVE == 0:
            smp.save_checkpoint(
                folder, tag=step, model=model, optimizer=optimizer, user_content={"step": step}
            )
    return losses


if __name__ == "__main__":
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    train(sys.argv[1], int([*sys.argv[2:], 0, 0, 0][attempt]))
