"""Fine-tuning: adapters, low ranks, prompts, quantization by training, functional transforms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from scripts.kit import Kit, script


class _Base(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q_proj": nn.Linear(width, width),
                    "v_proj": nn.Linear(width, width),
                    "norm": nn.LayerNorm(width),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 9)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            h = layer["norm"](x)
            scores = layer["q_proj"](h) @ h.transpose(1, 2) / math.sqrt(h.shape[-1])
            x = x + scores.softmax(-1) @ layer["v_proj"](h)
        return self.head(x)


def _next(model: Any, ids: Any) -> Any:
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    model.backward(loss)
    return loss


def _ids(size: int = 4) -> Any:
    return torch.randint(0, 9, (size, 6))


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2, alpha: int = 4) -> None:
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling, self.merged = alpha / rank, False

    def forward(self, x: Any) -> Any:
        out = self.base(x)
        if not self.merged:
            out = out + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling
        return out

    def merge(self) -> None:
        if not self.merged:
            self.base.weight.data += self.lora_B.data @ self.lora_A.data * self.scaling
            self.merged = True

    def unmerge(self) -> None:
        if self.merged:
            self.base.weight.data -= self.lora_B.data @ self.lora_A.data * self.scaling
            self.merged = False


@script()
def lora_by_hand_merged_for_evaluation(kit: Kit) -> None:
    net = _Base()
    net.requires_grad_(False)
    for layer in net.layers:
        for name in ("q_proj", "v_proj"):
            layer[name] = _Lora(layer[name])
    model = kit.model(net)
    optimizer = kit.optimizer(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    )
    train = kit.step(_next)

    @kit.step
    def evaluate(model: Any, ids: Any) -> Any:
        return model(ids)

    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        kit.note(train(model, _ids()))
        optimizer.step()
        model.eval()
        for m in net.modules():
            if isinstance(m, _Lora):
                m.merge()
        with torch.no_grad():
            kit.note(evaluate(model, _ids()).concat().abs().mean())
        for m in net.modules():
            if isinstance(m, _Lora):
                m.unmerge()
    kit.note(sum(v.abs().sum() for k, v in model.state_dict().items() if "lora_" in k))


@script()
def dora_with_magnitudes(kit: Kit) -> None:
    class Dora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
            self.bias = base.bias
            self.m = nn.Parameter(base.weight.detach().norm(p=2, dim=0, keepdim=True))
            self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Any) -> Any:
            adapted = self.weight + self.b @ self.a
            norm = adapted.norm(p=2, dim=0, keepdim=True).detach()
            return F.linear(x, self.m * adapted / norm, self.bias)

    def replace(module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, Dora(child))
            else:
                replace(child)

    net = _Base()
    replace(net)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))
    train = kit.step(_next)
    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, _ids()))
        optimizer.step()


@script()
def bottleneck_adapters_and_bitfit(kit: Kit) -> None:
    class Adapter(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Any) -> Any:
            return x + self.up(F.gelu(self.down(x)))

    net = _Base()
    for layer in net.layers:
        layer["v_proj"] = nn.Sequential(layer["v_proj"], Adapter(8))
    for name, p in net.named_parameters():
        p.requires_grad = "bias" in name or ".1." in name
    model = kit.model(net)
    kit.note(sum(p.numel() for p in model.parameters() if p.requires_grad))
    optimizer = kit.optimizer(
        torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2)
    )
    train = kit.step(_next)
    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, _ids()))
        optimizer.step()


@script()
def soft_prompts_before_a_frozen_model(kit: Kit) -> None:
    class Prompted(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base.requires_grad_(False).eval()
            self.prompt = nn.Parameter(base.embed.weight[:3].clone().detach())

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.base.eval()
            return self

        def forward(self, ids: Any) -> Any:
            x = self.base.embed(ids)
            x = torch.cat([self.prompt.unsqueeze(0).expand(len(ids), -1, -1), x], 1)
            for layer in self.base.layers:
                x = x + layer["v_proj"](layer["norm"](x)).cumsum(1) / x.shape[1]
            return self.base.head(x)[:, 3:]

    model = kit.model(Prompted(_Base()))
    optimizer = kit.optimizer(
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    )
    train = kit.step(_next)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        kit.note(train(model, _ids()))
        optimizer.step()


@script()
def quantization_aware_with_observers(kit: Kit) -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.round(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    class Fake(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.tensor(0.0))
            self.register_buffer("high", torch.tensor(0.0))
            self.enabled = True

        def forward(self, x: Any) -> Any:
            if self.training:
                with torch.no_grad():
                    self.low = torch.minimum(self.low, x.detach().min())
                    self.high = torch.maximum(self.high, x.detach().max())
            if not self.enabled:
                return x
            scale = (self.high - self.low).clamp(min=1e-6) / 15
            return (Round.apply((x - self.low) / scale).clamp(0, 15)) * scale + self.low

    net = nn.Sequential(
        nn.Linear(6, 8), Fake(), nn.ReLU(), nn.Linear(8, 8), Fake(), nn.Linear(8, 3)
    )
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for number in range(4):
        for m in net.modules():
            if isinstance(m, Fake):
                m.enabled = number > 0
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randint(0, 3, (8,))))
        optimizer.step()


@script()
def parametrized_orthogonal_and_symmetric_weights(kit: Kit) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.triu() + x.triu(1).transpose(-1, -2)

    class Positive(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.softplus(x)

        def right_inverse(self, w: Any) -> Any:
            return w.abs().clamp(min=1e-3).expm1().log()

    one, two, three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
    parametrize.register_parametrization(one, "weight", Symmetric())
    nn.utils.parametrizations.orthogonal(two, use_trivialization=False)
    parametrize.register_parametrization(three, "weight", Positive())
    model = kit.model(nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three))
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.05))

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
def pruned_before_training_then_made_permanent(kit: Kit) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for m in net:
        if isinstance(m, nn.Linear):
            prune.l1_unstructured(m, "weight", amount=0.3)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randint(0, 3, (8,))))
        optimizer.step()
