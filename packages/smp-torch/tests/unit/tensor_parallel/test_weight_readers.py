"""Which parameters of others the code of modules reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.tensor_parallel.auto.weight_readers import read_of_others


class Net(nn.Module):
    """Has what the ways below name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.maps = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.own = nn.Parameter(torch.zeros(4))


class Product(Net):
    def forward(self, x: Any) -> Any:
        return x @ self.embed.weight.T


class Argument(Net):
    def forward(self, x: Any) -> Any:
        return F.linear(x, self.maps[0].weight, self.maps[-1].bias)


class Named(Net):
    def head(self, x: Any) -> Any:
        weight = self.inner[0].weight
        return x @ weight

    def forward(self, x: Any) -> Any:
        return self.head(x)

    def never(self, x: Any) -> Any:
        return x @ self.embed.weight


class Decorated(Net):
    @torch.no_grad()
    def momentum(self) -> None:
        for parameter in self.inner.parameters():
            parameter.mul_(0.5)

    def forward(self, x: Any) -> Any:
        self.momentum()
        return x


class Inside(Net):
    def forward(self, x: Any) -> Any:
        return sum(x @ each for each in [self.embed.weight for _ in range(2)])


class OfAll(Net):
    def forward(self, x: Any) -> Any:
        return x.sum() + sum(each.norm() for each in self.parameters())


class Asking(Net):
    def forward(self, x: Any) -> Any:
        x = x.to(self.embed.weight.dtype) + self.own + self.inner[0](x)
        if isinstance(self.maps[0].weight, nn.Parameter) and self.maps[1].bias is None:
            x = x.to(next(self.inner.parameters()).device)
        if self.maps[0].bias is not None:
            x = self.maps[0](x)
        return x


#: By class, the parameters that it reads.
READ = {
    Product: {"embed.weight"},
    Argument: {"maps.0.weight"},
    Named: {"inner.0.weight"},
    Decorated: {"inner.0.weight", "inner.0.bias"},
    Inside: {"embed.weight"},
    OfAll: {name for name, _ in Net().named_parameters()},
    Asking: set(),
    nn.Sequential: set(),
    nn.MultiheadAttention: set(),
}


@pytest.mark.parametrize("kind", READ)
def test_code_shows_what_is_read(kind: type[nn.Module]) -> None:
    net = kind(4, 2) if kind is nn.MultiheadAttention else kind()
    named = {
        (module, key): f"{name}.{key}"
        for name, module in net.named_modules()
        for key in module._parameters
    }
    found = {named[each].lstrip(".") for each in read_of_others(net)}
    assert found == READ[kind]
