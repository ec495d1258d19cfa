"""Adversarial examples, and gradients that are turned around."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def domain_adversarial_reversal(kit: Kit) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, alpha: float) -> Any:
            ctx.alpha = alpha
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.neg() * ctx.alpha, None

    class Dann(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
            self.label = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
            self.domain = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: Any, alpha: float) -> Any:
            features = self.features(x)
            return self.label(features), self.domain(Reverse.apply(features, alpha))

    model = kit.model(Dann())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @kit.step
    def train(model: Any, source: Any, labels: Any, target: Any, alpha: Any) -> Any:
        classes, domains = model(source, alpha)
        loss = F.cross_entropy(classes, labels)
        loss = loss + F.cross_entropy(domains, torch.zeros(len(source), dtype=torch.long))
        _, domains = model(target, alpha)
        loss = loss + F.cross_entropy(domains, torch.ones(len(target), dtype=torch.long))
        model.backward(loss)
        return loss, (classes.argmax(1) == labels).double().mean()

    for number in range(3):
        alpha = 2.0 / (1.0 + 2.718281828 ** (-10 * number / 3)) - 1
        optimizer.zero_grad()
        kit.note(
            *train(
                model, torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.randn(8, 6) + 1, alpha
            )
        )
        optimizer.step()


@script()
def pgd_adversarial_training(kit: Kit) -> None:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any, start: Any) -> Any:
        delta = start.clone().detach().requires_grad_(True)
        for _ in range(2):
            loss = F.cross_entropy(model(x + delta), y)
            (grad,) = torch.autograd.grad(loss, [delta])
            delta = (delta + 0.05 * grad.sign()).clamp(-0.1, 0.1).detach().requires_grad_(True)
        clean, attacked = model(x), model((x + delta).clamp(-3, 3))
        loss = F.cross_entropy(clean, y) + 6 * F.kl_div(
            F.log_softmax(attacked, 1), F.softmax(clean, 1), reduction="batchmean"
        )
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(
            train(
                model,
                torch.randn(8, 6),
                torch.randint(0, 3, (8,)),
                torch.empty(8, 6).uniform_(-0.1, 0.1),
            )
        )
        optimizer.step()


@script()
def free_lb_on_embeddings(kit: Kit) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8, padding_idx=0)
            self.encoder = nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, ids: Any, delta: Any = None) -> Any:
            x = self.embedding(ids)
            if delta is not None:
                x = x + delta
            x, _ = self.encoder(x)
            return self.head(x.mean(1))

    model = kit.model(Tagger())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, ids: Any, y: Any) -> Any:
        delta = torch.zeros(*ids.shape, 8, requires_grad=True)
        total = 0
        for _ in range(2):
            loss = F.cross_entropy(model(ids, delta), y) / 2
            model.backward(loss)
            grad = delta.grad.detach()
            norm = grad.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1)
            delta = (delta + 0.1 * grad / norm).detach().requires_grad_()
            total = total + loss.detach()
        return total

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randint(0, 11, (8, 5)), torch.randint(0, 4, (8,))))
        optimizer.step()
