"""Small models and batches that several scripts have."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(widths):
        layers += [nn.Linear(one, two), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Line:
    """An environment: a point on a line that moves."""

    def __init__(self) -> None:
        self.state = np.zeros(3)

    def reset(self) -> Any:
        self.state = np.random.uniform(-1, 1, 3)
        return self.state.copy()

    def step(self, action: Any) -> Any:
        self.state = np.clip(self.state + 0.1 * (np.asarray(action).sum() - 0.5), -2, 2)
        return self.state.copy(), float(-np.abs(self.state).sum()), bool(self.state[0] > 1.5)


class Classifier(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        # A bias before a norm has a gradient of zero, by whose rounding signs would go.
        first = nn.Linear(6, width, bias=False)
        self.encoder = nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.middle(self.encoder(x)))


def trained(model: Any, x: Any, y: Any) -> Any:
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def draw_batch(size: int = 8) -> Any:
    return torch.randn(size, 6), torch.randint(0, 3, (size,))
