"""A body that trains for many steps."""

from __future__ import annotations

import gc
from unittest import mock

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing.footprint import check_long_run
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.record.ir import Graph
from smdistributed.modelparallel.torch.stepping import lockstep, preparing

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


def ask(num_first: int, num_steps: int) -> tuple[int, int]:
    """Asks for another number in each step.

    Args:
        num_first, num_steps: of the steps.

    Returns: the most graphs that are held in the first steps, and in the others.
    """
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))

    @smp.step
    def compute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss: torch.Tensor = out.square().mean() * float(out.detach().mean())
        model.backward(loss)  # type: ignore[operator]
        return loss

    held = []
    with (
        mock.patch.multiple(lockstep, _MOST_OPERATIONS=40, _MOST_WAYS=6, _MOST_PLANS=8),
        mock.patch.object(preparing, "_MOST_PREPARED", 6),
    ):
        for _ in range(num_steps):
            compute(model, torch.randn(8, WIDTH))
            assert len(FakeTensorMode.cache) < 80
            gc.collect()
            held.append(sum(type(each) is Graph for each in gc.get_objects()))
    return max(held[:num_first]), max(held[num_first:])
