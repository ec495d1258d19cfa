"""Normalizing flows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.kit import Kit, script


@script()
def real_nvp_with_logdet_and_masks(kit: Kit) -> None:
    class Coupling(nn.Module):
        def __init__(self, mask: Any) -> None:
            super().__init__()
            self.register_buffer("mask", mask)
            self.scale = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())
            self.shift = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x: Any) -> Any:
            kept = x * self.mask
            s, t = self.scale(kept) * (1 - self.mask), self.shift(kept) * (1 - self.mask)
            return kept + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(-1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            masks = [torch.tensor([1.0, 0, 1, 0]), torch.tensor([0, 1.0, 0, 1])]
            self.flows = nn.ModuleList(Coupling(masks[i % 2]) for i in range(4))
            self.register_buffer("loc", torch.zeros(4))
            self.register_buffer("scale", torch.ones(4))

        @property
        def prior(self) -> Any:
            return torch.distributions.Independent(
                torch.distributions.Normal(self.loc, self.scale), 1
            )

        def log_prob(self, x: Any) -> Any:
            total = x.new_zeros(len(x))
            for flow in self.flows:
                x, logdet = flow(x)
                total += logdet
            return self.prior.log_prob(x) + total

        def forward(self, x: Any) -> Any:
            return self.log_prob(x)

    model = kit.model(Flow())
    optimizer = kit.optimizer(torch.optim.NAdam(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, x: Any) -> Any:
        loss = -model(x).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 4)))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()


@script()
def glow_actnorm_initialized_by_first_batch(kit: Kit) -> None:
    class ActNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.loc = nn.Parameter(torch.zeros(1, width))
            self.log_scale = nn.Parameter(torch.zeros(1, width))
            self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

        def initialize(self, x: Any) -> None:
            with torch.no_grad():
                self.loc.data.copy_(-x.mean(0, keepdim=True))
                self.log_scale.data.copy_(-torch.log(x.std(0, keepdim=True) + 1e-6))

        def forward(self, x: Any) -> Any:
            if self.training and self.initialized.item() == 0:
                self.initialize(x)
                self.initialized.fill_(1)
            return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()

    class InvConv(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0])

        def forward(self, x: Any) -> Any:
            return x @ self.weight.t(), torch.slogdet(self.weight)[1]

    class Glow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList()
            for _ in range(3):
                self.steps.append(ActNorm(4))
                self.steps.append(InvConv(4))

        def forward(self, x: Any) -> Any:
            logdet: Any = 0
            for step in self.steps:
                x, one = step(x)
                logdet = logdet + one
            return x, logdet

    model = kit.model(Glow())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, x: Any) -> Any:
        z, logdet = model(x)
        loss = (0.5 * z.pow(2).sum(1) - logdet).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 4) * 2 + 1))
        optimizer.step()
