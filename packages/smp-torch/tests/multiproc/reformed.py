"""Parameters that get another type or shape after wrapping: way x moment, in the world at hand.

Each stays the object that it was, as ``.half()`` and ``resize_token_embeddings`` leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

WIDTH, SIZE = 4, 6


class Net(nn.Module):
    """Its embedding is its head, too; the middle is on another partition."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIZE, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, SIZE, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.middle(self.embed(ids))) * self.scale
        return logits


def _grown(model: Any, size: int) -> None:
    """As ``resize_token_embeddings``: the parameter stays, its data are others."""
    net = model.get_module() if isinstance(model, smp.DistributedModel) else model
    grown = torch.full((size, WIDTH), 0.25, device=net.embed.weight.device)
    kept = min(size, SIZE)
    with torch.no_grad():
        grown[:kept] = net.embed.weight.detach()[:kept].to(grown.device)
    net.embed.weight.data = grown
    net.embed.num_embeddings = net.head.out_features = size


def _data(model: nn.Module) -> None:
    for each in (*model.parameters(), *model.buffers()):
        each.data = each.data.bfloat16()


WAYS: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "data": _data,
    "grown": lambda model: _grown(model, SIZE + 3),
    "shrunk": lambda model: _grown(model, SIZE - 2),
}
MOMENTS = {"before": 0, "after_one": 1, "after_two": 2}


def _body(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids).float().square().mean()
    model.backward(loss)
    return loss


def _made() -> Net:
    torch.manual_seed(0)
    return Net()


def _losses(way: str, moment: str) -> Iterator[tuple[float, float]]:
    """Trains with the library and without, with the change between; yields both losses."""
    net, plain = _made(), _made()
    if smp.pp_size() > 1:
        smp.set_partition(net.middle, 1)
    model = smp.DistributedModel(net)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    mine, theirs = smp.DistributedOptimizer(sgd), torch.optim.SGD(plain.parameters(), lr=0.1)
    step, count = smp.step(_body), smp.state.cfg.microbatches
    ids = torch.arange(4 * count * smp.dp_size()) * 3 % (SIZE - 2)
    for number in range(MOMENTS[moment] + 2):
        model.zero_grad()
        theirs.zero_grad()
        if number == MOMENTS[moment]:
            WAYS[way](model)
            WAYS[way](plain)
        found = step(model, ids.chunk(smp.dp_size())[smp.dp_rank()]).reduce_mean().item()
        wanted = 0.0
        for place, share in enumerate(ids.chunk(smp.dp_size())):
            for part in share.chunk(count):
                loss = plain(part).float().square().mean() / count
                (loss / smp.dp_size()).backward()
                wanted += loss.item() if place == smp.dp_rank() else 0.0
                del loss  # whose graph would remember the former shape
        mine.step()
        theirs.step()
        yield found, wanted
    state = model.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    for name, value in plain.state_dict().items():
        assert state[name].dtype is value.dtype
        torch.testing.assert_close(state[name].cpu(), value.cpu(), rtol=0, atol=_tolerance(way))


def _tolerance(way: str) -> float:
    return 1e-5 if way in ("double", "grown", "shrunk") else 2e-2


def compare(way: str, moment: str) -> None:
    """Losses and the state are those of plain PyTorch after the same calls."""
    for found, wanted in _losses(way, moment):
        assert found == pytest.approx(wanted, abs=_tolerance(way))
