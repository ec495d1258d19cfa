"""Products in eight bits, by torchao, in models that are distributed afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from world import pipeline, replicas, run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

WIDTH, ROWS, STEPS = 32, 16, 4
SHARDS = world_of(
    2,
    {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
        "microbatches": 4,
    },
)


def model() -> nn.Module:
    """Returns a model whose middle layers multiply in eight bits; emulated, so on any device."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))
    float8.convert_to_float8_training(
        net,
        config=float8.Float8LinearConfig(emulate=True),
        module_filter_fn=lambda _, name: name not in ("0", "5"),
    )
    assert sum(type(each).__name__ == "Float8Linear" for each in net.modules()) == 4
    return net


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the examples of all replicas."""
    numbers = torch.Generator(torch.get_default_device()).manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=numbers), torch.randn(ROWS, 1, generator=numbers)


def plain(parts: int) -> list[float]:
    """Trains in one process; returns the losses."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for x, y in zip(*(each.chunk(parts) for each in batch()), strict=True):
            loss = (net(x) - y).square().mean() / parts
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained() -> tuple[list[float], list[float]]:
    """Trains with the library; returns the losses of all replicas, and those of one process."""
    net = smp.DistributedModel(model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))

    @smp.step
    def step(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (net(x) - y).square().mean()
        net.backward(loss)
        return loss

    own = [each.chunk(smp.dp_size())[smp.dp_rank()] for each in batch()]
    losses = []
    for _ in range(STEPS):
        loss = step(net, *own).reduce_mean().item()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
        optimizer.zero_grad()
    return losses, plain(smp.state.cfg.microbatches * smp.dp_size())


@pytest.mark.parametrize(
    "world", [pipeline(2, launcher="fork"), replicas(2, 1), SHARDS], ids=["pp", "dp", "shards"]
)
def test_losses_are_those_of_one_process(worlds: Worlds, world: World) -> None:
    pytest.importorskip("torchao.float8")
    for losses, expected in run(worlds, world, trained):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[-1] < losses[0]
