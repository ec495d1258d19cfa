"""Losses that are weighed, and penalties."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script
from scripts.small import Classifier, draw_batch, trained


@script()
def multitask_with_learned_uncertainties(kit: Kit) -> None:
    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.heads = nn.ModuleDict({"class": nn.Linear(8, 3), "value": nn.Linear(8, 1)})
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x: Any, **targets: Any) -> Any:
            h = self.shared(x)
            losses = {
                "class": F.cross_entropy(self.heads["class"](h), targets["label"]),
                "value": F.mse_loss(self.heads["value"](h).squeeze(1), targets["value"]),
            }
            total = sum(
                torch.exp(-s) * loss + s
                for s, loss in zip(self.log_vars, losses.values(), strict=True)
            )
            return total, losses

    model = kit.model(Multi())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, batch: Any) -> Any:
        total, losses = model(**batch)
        model.backward(total)
        return {"total": total, **losses}

    for _ in range(3):
        x, y = draw_batch()
        optimizer.zero_grad()
        kit.note(*train(model, {"x": x, "label": y, "value": torch.randn(8)}).values())
        optimizer.step()


@script()
def gradient_surgery_between_two_losses(kit: Kit) -> None:
    net = nn.ModuleDict({"body": nn.Linear(6, 8), "a": nn.Linear(8, 2), "b": nn.Linear(8, 2)})

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: Any) -> Any:
            h = torch.tanh(self.parts["body"](x))
            return self.parts["a"](h), self.parts["b"](h)

    model = kit.model(Two())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def first(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x)[0], y)
        model.backward(loss)
        return loss

    @kit.step
    def second(model: Any, x: Any, y: Any) -> Any:
        loss = F.l1_loss(model(x)[1], y)
        model.backward(loss)
        return loss

    for _ in range(2):
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        grads = []
        for each in (first, second):
            optimizer.zero_grad()
            kit.note(each(model, x, y))
            grads.append(
                [
                    torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for p in model.parameters()
                ]
            )
        optimizer.zero_grad()
        dot = sum((a * b).sum() for a, b in zip(*grads, strict=True))
        square = sum((b * b).sum() for b in grads[1])
        for p, a, b in zip(model.parameters(), *grads, strict=True):
            if dot < 0:
                a = a - dot / square * b
            p.grad = a + b
        optimizer.step()


@script()
def balanced_losses_by_gradient_norms(kit: Kit) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
            self.last = nn.Linear(8, 8)
            self.decoder, self.head = nn.Linear(8, 6), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            h = self.last(self.encoder(x))
            return self.decoder(h), self.head(h)

    net = Net()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        recon, out = model(x)
        a, b = F.mse_loss(recon, x), F.cross_entropy(out, y)
        (ga,) = torch.autograd.grad(a, net.last.weight, retain_graph=True)
        (gb,) = torch.autograd.grad(b, net.last.weight, retain_graph=True)
        weight = (ga.norm() / (gb.norm() + 1e-4)).clamp(0, 1e4).detach()
        loss = a + weight * b
        model.backward(loss)
        return loss, weight

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(*train(model, *draw_batch()))
        optimizer.step()


@script()
def elastic_weight_consolidation(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    train = kit.step(trained)
    fisher: dict[str, Any] = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for _ in range(2):
        model.zero_grad()
        kit.note(train(model, *draw_batch()))
        for n, p in net.named_parameters():
            fisher[n] += p.grad.data.pow(2) / 2
    old = {n: p.detach().clone() for n, p in net.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        penalty: Any = 0.0
        for n, p in net.named_parameters():
            penalty = penalty + (fisher[n] * (p - old[n]).pow(2)).sum()
            p.grad.add_(fisher[n] * (p.detach() - old[n]) * 2 * 5)
        kit.note(penalty.item())
        optimizer.step()


@script()
def weight_penalties_in_the_loss(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        l1 = sum(p.abs().sum() for n, p in net.named_parameters() if "bias" not in n)
        gram = net.middle[0].weight @ net.middle[0].weight.t()
        orthogonal = (gram - torch.eye(len(gram))).pow(2).sum()
        loss = loss + 1e-3 * l1 + 1e-2 * orthogonal
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
