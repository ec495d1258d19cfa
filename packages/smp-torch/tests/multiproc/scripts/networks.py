"""Vision, graphs, physics, mixtures: kinds of models with their ways of computing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from scripts.kit import Kit, script


@script()
def experts_routed_by_hand_with_balance_loss(kit: Kit) -> None:
    class Moe(nn.Module):
        def __init__(self, width: int, experts: int, k: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
                for _ in range(experts)
            )
            self.k = k

        def forward(self, x: Any) -> Any:
            shape = x.shape
            x = x.reshape(-1, shape[-1])
            probs = self.gate(x).softmax(-1)
            top, chosen = probs.topk(self.k, dim=-1)
            top = top / top.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                token, slot = torch.where(chosen == i)
                if token.numel() == 0:
                    continue
                out.index_add_(0, token, expert(x[token]) * top[token, slot, None])
            load = F.one_hot(chosen[:, 0], len(self.experts)).to(x.dtype).mean(0)
            self.aux = len(self.experts) * (load * probs.mean(0)).sum()
            return out.reshape(shape)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.layers = nn.ModuleList(Moe(6, 3, 2) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
            self.head = nn.Linear(6, 9)

        def forward(self, ids: Any) -> Any:
            x, aux = self.embed(ids), 0.0
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x))
                aux = aux + layer.aux
            return self.head(x), aux

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, ids: Any) -> Any:
        logits, aux = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux
        model.backward(loss)
        return loss, aux

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(*train(model, torch.randint(0, 9, (4, 5))))
        optimizer.step()


@script()
def deep_equilibrium_with_implicit_hook(kit: Kit) -> None:
    class Deq(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

        def f(self, z: Any, x: Any) -> Any:
            return self.norm(torch.tanh(self.lin(z) + x))

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(5):
                    z = self.f(z, x)
            z = self.f(z, x)
            z0 = z.clone().detach().requires_grad_()
            f0 = self.f(z0, x)

            def backward_hook(grad: Any) -> Any:
                g = grad
                for _ in range(4):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            if z.requires_grad:
                z.register_hook(backward_hook)
            return z

    model = kit.model(nn.Sequential(nn.Linear(4, 6), Deq(6), nn.Linear(6, 2)))
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 4), torch.randn(8, 2)))
        optimizer.step()


@script()
def checkpointed_blocks_both_ways(kit: Kit) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3)
            )
            self.tail = nn.Sequential(
                *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            )
            self.head = nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                y = checkpoint(block, x, use_reentrant=False) if i % 2 == 0 else block(x)
                x = x + y
            x = checkpoint_sequential(self.tail, 2, x, use_reentrant=False)
            return self.head(x)

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randn(8, 2)))
        optimizer.step()


@script()
def hypernetwork_with_functional_layers(kit: Kit) -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tasks = nn.Embedding(3, 4)
            self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
            self.weight, self.bias = nn.Linear(8, 5 * 3), nn.Linear(8, 3)
            self.features = nn.Sequential(nn.Linear(6, 5), nn.ReLU())

        def forward(self, x: Any, task: Any) -> Any:
            h = self.trunk(self.tasks(task))
            w, b = self.weight(h).view(-1, 3, 5), self.bias(h)
            return torch.bmm(w, self.features(x).unsqueeze(-1)).squeeze(-1) + b

    model = kit.model(Hyper())
    optimizer = kit.optimizer(torch.optim.Rprop(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, task: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x, task), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.randn(8, 3)))
        optimizer.step()
