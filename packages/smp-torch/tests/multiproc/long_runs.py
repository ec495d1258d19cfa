"""A body that trains for many steps."""

from __future__ import annotations

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing.footprint import check_long_run

WIDTH = 8


def train(num_first: int, num_steps: int) -> None:
    """Asserts that a process holds no more after many steps than after the first of them."""
    with smp.tensor_parallelism():
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = smp.DistributedModel(nn.Sequential(*layers, nn.Dropout(0.1)))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3))

    @smp.step
    def compute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        model.backward(loss)  # type: ignore[operator]
        return loss

    def step() -> float:
        optimizer.zero_grad()
        loss = compute(model, torch.ones(8, WIDTH))
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.reduce_mean())

    check_long_run(step, num_first, num_steps)
