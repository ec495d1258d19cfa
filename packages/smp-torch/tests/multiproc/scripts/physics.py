"""Equations, fields and waves."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script, single


@script()
def physics_informed_heat_equation(kit: Kit) -> None:
    class Pinn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *(m for a, b in ((2, 8), (8, 8), (8, 8)) for m in (nn.Linear(a, b), nn.Tanh())),
                nn.Linear(8, 1),
            )
            self.diffusivity = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Any, t: Any) -> Any:
            return self.net(torch.cat([x, t], 1))

    net = Pinn()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, x: Any, t: Any, x0: Any, u0: Any) -> Any:
        x, t = x.requires_grad_(), t.requires_grad_()
        u = model(x, t)
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
        residual = u_t - net.diffusivity * u_xx
        loss = residual.pow(2).mean() + (model(x0, torch.zeros_like(x0)) - u0).pow(2).mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        x0 = torch.rand(8, 1)
        kit.note(train(model, torch.rand(8, 1), torch.rand(8, 1), x0, torch.sin(3.14 * x0)))
        optimizer.step()


@script()
def radiance_field_with_volume_rendering(kit: Kit) -> None:
    class Nerf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(15, 8), nn.Linear(8, 8), nn.Linear(8 + 15, 8)])
            self.sigma, self.rgb = nn.Linear(8, 1), nn.Linear(8 + 3, 3)

        def encode(self, x: Any) -> Any:
            return torch.cat(
                [x, *(f(x * 2.0**i) for i in range(2) for f in (torch.sin, torch.cos))], -1
            )

        def forward(self, x: Any, d: Any) -> Any:
            e = self.encode(x)
            h = e
            for i, layer in enumerate(self.layers):
                if i == 2:
                    h = torch.cat([h, e], -1)
                h = F.relu(layer(h))
            return self.rgb(torch.cat([h, d], -1)).sigmoid(), F.softplus(self.sigma(h)).squeeze(-1)

    coarse = kit.model(Nerf())
    optimizer = kit.optimizer(torch.optim.Adam(coarse.parameters(), 5e-3))

    @kit.step
    def train(model: Any, origin: Any, direction: Any, color: Any, jitter: Any) -> Any:
        z = torch.linspace(0.1, 2, 4).expand(len(origin), 4) + jitter
        points = origin[:, None] + direction[:, None] * z[..., None]
        rgb, sigma = model(points, direction[:, None].expand_as(points))
        delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e2)], -1)
        alpha = 1 - torch.exp(-sigma * delta)
        trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)
        weights = alpha * trans[:, :-1]
        out = (weights[..., None] * rgb).sum(1)
        loss = F.mse_loss(out, color)
        model.backward(loss)
        return loss, -10.0 * torch.log10(loss.detach())

    for number in range(3):
        optimizer.zero_grad()
        kit.note(
            *train(
                coarse, torch.randn(8, 3), F.normalize(torch.randn(8, 3), dim=-1),
                torch.rand(8, 3), 0.1 * torch.rand(8, 4),
            )
        )  # fmt: skip
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * 0.1 ** (number / 10)


@script()
def spectral_operator_with_complex_weights(kit: Kit) -> None:
    class Spectral(nn.Module):
        def __init__(self, width: int, modes: int) -> None:
            super().__init__()
            self.modes = modes
            self.weights = nn.Parameter(
                torch.rand(width, width, modes, dtype=torch.cdouble) / width
            )

        def forward(self, x: Any) -> Any:
            ft = torch.fft.rfft(x)
            out = torch.zeros_like(ft)
            out[:, :, : self.modes] = torch.einsum(
                "bix,iox->box", ft[:, :, : self.modes], self.weights
            )
            return torch.fft.irfft(out, n=x.size(-1))

    class Fno(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.project = nn.Linear(2, 6), nn.Linear(6, 1)
            self.spectral = nn.ModuleList(Spectral(6, 3) for _ in range(2))
            self.local = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(2))

        def forward(self, x: Any) -> Any:
            grid = torch.linspace(0, 1, x.shape[1]).reshape(1, -1, 1).repeat(len(x), 1, 1)
            x = self.lift(torch.cat([x, grid], -1)).permute(0, 2, 1)
            for spectral, local in zip(self.spectral, self.local, strict=True):
                x = F.gelu(spectral(x) + local(x))
            return self.project(x.permute(0, 2, 1))

    model = kit.model(Fno())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        n = len(x)
        loss = ((out - y).reshape(n, -1).norm(dim=1) / y.reshape(n, -1).norm(dim=1)).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(4, 8, 1), torch.randn(4, 8, 1)))
        optimizer.step()


@single()
def complex_network_of_single_precision(kit: Kit) -> None:
    class Complex(nn.Module):
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            self.re, self.im = nn.Linear(n_in, n_out), nn.Linear(n_in, n_out)

        def forward(self, z: Any) -> Any:
            return torch.complex(
                self.re(z.real) - self.im(z.imag), self.re(z.imag) + self.im(z.real)
            )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Complex(4, 6), Complex(6, 2)
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))

        def forward(self, z: Any) -> Any:
            z = self.one(z) * torch.exp(1j * self.phase.angle())
            z = F.relu(z.abs() - 0.1) * torch.exp(1j * z.angle())
            return self.two(z)

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.05))

    @kit.step
    def train(model: Any, z: Any, y: Any) -> Any:
        error = model(z) - y
        loss = (error * error.conj()).real.mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        draw = torch.randn(8, 4, 2), torch.randn(8, 2, 2)
        kit.note(train(model, *(torch.view_as_complex(each) for each in draw)))
        optimizer.step()


@script()
def neural_ode_by_runge_kutta_steps(kit: Kit) -> None:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.nfe = 0

        def forward(self, t: Any, y: Any) -> Any:
            self.nfe += 1
            return self.net(torch.cat([y**3, t.expand(len(y), 1)], -1))

    class Ode(nn.Module):
        def __init__(self, field: nn.Module) -> None:
            super().__init__()
            self.field = field

        def forward(self, y: Any, times: Any) -> Any:
            found = [y]
            for t0, t1 in itertools.pairwise(times):
                h = t1 - t0
                k1 = self.field(t0, y)
                k2 = self.field(t0 + h / 2, y + h / 2 * k1)
                k3 = self.field(t0 + h / 2, y + h / 2 * k2)
                k4 = self.field(t1, y + h * k3)
                y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                found.append(y)
            return torch.stack(found, 1)

    net = Ode(Field())
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.RMSprop(model.parameters(), 1e-3))

    @kit.step(non_split_inputs=["times"])
    def train(model: Any, y0: Any, want: Any, times: Any = None) -> Any:
        loss = (model(y0, times) - want).abs().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(
            train(model, torch.randn(4, 2), torch.randn(4, 3, 2), times=torch.linspace(0, 1, 3))
        )
        optimizer.step()
