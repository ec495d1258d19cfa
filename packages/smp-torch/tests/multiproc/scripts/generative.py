"""Diffusion, flows, autoencoders, codebooks and energies."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


def sinusoids(t: Any, width: int) -> Any:
    half = width // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


@script()
def ddpm_with_schedule_buffers_and_ema(kit: Kit) -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
            self.inp = nn.Linear(4, 16)
            self.mid = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.out = nn.Linear(16, 4)

        def forward(self, x: Any, t: Any) -> Any:
            emb = self.time(sinusoids(t, 8))
            h = self.inp(x)
            for layer in self.mid:
                h = h + layer(F.silu(h + emb))
            return self.out(h)

    class Diffusion(nn.Module):
        def __init__(self, net: nn.Module, steps: int = 20) -> None:
            super().__init__()
            self.net, self.steps = net, steps
            betas = torch.linspace(1e-4, 0.02, steps)
            bar = torch.cumprod(1 - betas, 0)
            self.register_buffer("sqrt_bar", bar.sqrt())
            self.register_buffer("sqrt_rest", (1 - bar).sqrt(), persistent=False)

        def extract(self, table: Any, t: Any, shape: Any) -> Any:
            return table.gather(-1, t).reshape(len(t), *((1,) * (len(shape) - 1)))

        def forward(self, x: Any, t: Any, noise: Any) -> Any:
            noisy = (
                self.extract(self.sqrt_bar, t, x.shape) * x
                + self.extract(self.sqrt_rest, t, x.shape) * noise
            )
            return F.mse_loss(self.net(noisy, t), noise)

        @torch.no_grad()
        def sample(self, x: Any) -> Any:
            for t in reversed(range(3)):
                x = x - 0.1 * self.net(x, torch.full((len(x),), t))
            return x

    net = Diffusion(Denoiser())
    ema = copy.deepcopy(net)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01))

    @kit.step
    def train(model: Any, x: Any, t: Any, noise: Any) -> Any:
        loss = model(x, t, noise)
        model.backward(loss)
        return loss

    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        kit.note(train(model, x, torch.randint(0, 20, (8,)), torch.randn_like(x)))
        kit.note(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        for kept, p in zip(ema.parameters(), net.parameters(), strict=True):
            kept.data.mul_(0.9).add_(p.data, alpha=0.1)
    kit.note(ema.sample(torch.ones(2, 4)).sum().item())


@script()
def flow_matching_with_guidance_dropout(kit: Kit) -> None:
    class Velocity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.label = nn.Embedding(4 + 1, 8)
            self.blocks = nn.Sequential(
                *(m for _ in range(3) for m in (nn.Linear(8, 8), nn.GELU()))
            )
            self.inp, self.out = nn.Linear(3 + 1, 8), nn.Linear(8, 3)

        def forward(self, x: Any, t: Any, y: Any) -> Any:
            h = self.inp(torch.cat([x, t], -1)) + self.label(y)
            return self.out(self.blocks(h))

    model = kit.model(Velocity())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, x1: Any, x0: Any, t: Any, y: Any, drop: Any) -> Any:
        y = torch.where(drop, torch.full_like(y, 4), y)
        xt = torch.lerp(x0, x1, t)
        loss = (model(xt, t, y) - (x1 - x0)).pow(2).mean(-1)
        weight = 1 / (t.squeeze(-1) + 0.1)
        loss = (loss * weight).sum() / weight.sum()
        model.backward(loss)
        return loss

    @kit.step
    def velocity(model: Any, x: Any, t: Any, y: Any) -> Any:
        conditional, unconditional = model(
            torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, torch.full_like(y, 4)])
        ).chunk(2)
        return unconditional + 2.0 * (conditional - unconditional)

    for _ in range(3):
        optimizer.zero_grad()
        loss = train(
            model, torch.randn(8, 3), torch.randn(8, 3), torch.rand(8, 1),
            torch.randint(0, 4, (8,)), torch.rand(8) < 0.2,
        )  # fmt: skip
        optimizer.step()
        kit.note(loss)
    model.eval()
    x = torch.randn(4, 3)
    with torch.no_grad():
        for number in range(4):
            t = torch.full((4, 1), number / 4)
            x = x + 0.25 * velocity(model, x, t, torch.arange(4)).concat()
    kit.note(x)


@script()
def score_matching_with_dataclass_batch(kit: Kit) -> None:
    @dataclass
    class Batch:
        x: Any
        sigma: Any
        noise: Any
        name: str = "points"

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4) * 2, requires_grad=False)
            self.net = nn.Sequential(
                nn.Linear(2 + 8, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(),
                nn.Linear(16, 2),
            )  # fmt: skip

        def forward(self, x: Any, sigma: Any) -> Any:
            proj = sigma.log()[:, None] * self.w[None] * 2 * math.pi
            h = torch.cat([x, proj.sin(), proj.cos()], -1)
            return self.net(h) / sigma[:, None]

    model = kit.model(Score())
    optimizer = kit.optimizer(
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    )

    @kit.step
    def train(model: Any, batch: Any) -> Any:
        noisy = batch.x + batch.noise * batch.sigma[:, None]
        score = model(noisy, batch.sigma)
        loss = ((score * batch.sigma[:, None] + batch.noise) ** 2).sum(-1).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        sigma = torch.exp(torch.rand(8) * 3 - 2)
        optimizer.zero_grad()
        kit.note(train(model, Batch(torch.randn(8, 2), sigma, torch.randn(8, 2))))
        optimizer.step()


@script()
def energy_model_with_langevin_between_steps(kit: Kit) -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(3, 12), nn.ELU(), nn.Linear(12, 12), nn.ELU(), nn.Linear(12, 1)
            )

        def forward(self, x: Any) -> Any:
            return self.net(x).squeeze(-1)

    model = kit.model(Energy())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    @kit.step
    def slope(model: Any, x: Any) -> Any:
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(model(x).sum(), x)[0]

    @kit.step
    def train(model: Any, real: Any, fake: Any) -> Any:
        up, down = model(real), model(fake)
        loss = up.mean() - down.mean() + 0.1 * (up.square() + down.square()).mean()
        model.backward(loss)
        return loss

    buffer = torch.randn(16, 3)
    for _ in range(3):
        at = torch.randint(0, 16, (8,))
        x = buffer[at]
        for _ in range(2):
            x = x - 0.1 * slope(model, x).concat() + 0.01 * torch.randn_like(x)
        buffer[at] = x
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 3) + 1, x))
        optimizer.step()


@script()
def autoregressive_pixels_with_masked_convolutions(kit: Kit) -> None:
    class MaskedConv(nn.Conv2d):
        def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            _, _, h, w = self.weight.shape
            self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
            self.mask[:, :, h // 2 + 1 :] = 0

        def forward(self, x: Any) -> Any:
            self.weight.data *= self.mask
            return super().forward(x)

    net = nn.Sequential(
        MaskedConv("A", 1, 4, 3, padding=1), nn.ReLU(), MaskedConv("B", 4, 4, 3, padding=1),
        nn.ReLU(), nn.Conv2d(4, 5, 1),
    )  # fmt: skip
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, x: Any) -> Any:
        loss = F.cross_entropy(model(x / 4.0), x.squeeze(1).long())
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randint(0, 5, (4, 1, 4, 4)).double()))
        optimizer.step()
