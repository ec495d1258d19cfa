"""Optimizers written by hand, and those that ask for more than one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script
from scripts.small import Classifier, draw_batch, trained


@script()
def sam_in_two_steps_by_hand(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9))
    train = kit.step(trained)
    for _ in range(2):
        x, y = draw_batch()
        optimizer.zero_grad()
        kit.note(train(model, x, y))
        with torch.no_grad():
            norm = torch.norm(
                torch.stack([p.grad.norm(p=2) for p in model.parameters() if p.grad is not None]),
                p=2,
            )
            moved = {}
            for p in model.parameters():
                if p.grad is None:
                    continue
                moved[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(moved[p])
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.backup_momentum, m.momentum = m.momentum, 0
        optimizer.zero_grad()
        train(model, x, y)
        with torch.no_grad():
            for p, e in moved.items():
                p.sub_(e)
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.momentum = m.backup_momentum
        optimizer.step()


@script()
def lion_written_by_hand(kit: Kit) -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(
            self, params: Any, lr: float, betas: Any = (0.9, 0.99), wd: float = 0.1
        ) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    p.data.mul_(1 - group["lr"] * group["wd"])
                    state = self.state[p]
                    if len(state) == 0:
                        state["exp_avg"] = torch.zeros_like(p)
                    b1, b2 = group["betas"]
                    update = state["exp_avg"].clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_()
                    p.add_(update, alpha=-group["lr"])
                    state["exp_avg"].mul_(b2).add_(p.grad, alpha=1 - b2)

    model = kit.model(Classifier())
    optimizer = kit.optimizer(Lion(model.parameters(), 1e-3))
    train = kit.step(trained)
    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()


@script()
def lamb_with_trust_ratios(kit: Kit) -> None:
    class Lamb(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "weight_decay": 0.01})

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                    m, v = state["m"], state["v"]
                    m.mul_(0.9).add_(p.grad.data, alpha=0.1)
                    v.mul_(0.999).addcmul_(p.grad.data, p.grad.data, value=0.001)
                    update = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p.data
                    w_norm, u_norm = (
                        p.data.pow(2).sum().sqrt().clamp(0, 10),
                        update.pow(2).sum().sqrt(),
                    )
                    ratio = 1 if w_norm == 0 or u_norm == 0 else w_norm / u_norm
                    p.data.add_(update * (-group["lr"] * ratio))

    model = kit.model(Classifier())
    optimizer = kit.optimizer(Lamb(model.parameters(), 1e-2))
    train = kit.step(trained)
    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()


@script()
def factored_second_moments(kit: Kit) -> None:
    class Factored(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
                g, state = p.grad, self.state[p]
                if p.dim() >= 2:
                    if "row" not in state:
                        state["row"] = torch.zeros(p.shape[:-1])
                        state["col"] = torch.zeros(p.shape[:-2] + p.shape[-1:])
                    row, col = state["row"], state["col"]
                    row.mul_(0.8).add_(g.square().mean(-1), alpha=0.2)
                    col.mul_(0.8).add_(g.square().mean(-2), alpha=0.2)
                    scale = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
                    update = g * scale * col.rsqrt().unsqueeze(-2)
                else:
                    state.setdefault("sq", torch.zeros_like(g)).mul_(0.8).add_(
                        g.square(), alpha=0.2
                    )
                    update = g * (state["sq"] + 1e-12).rsqrt()
                update.div_((update.norm(2) / update.numel() ** 0.5).clamp(min=1.0))
                p.add_(update, alpha=-1e-2 * max(1e-3, float(p.norm(2) / p.numel() ** 0.5)))

    net = nn.Sequential(
        nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 8), nn.GELU(), nn.Linear(8, 3)
    )
    model = kit.model(net)
    optimizer = kit.optimizer(Factored(model.parameters()))
    train = kit.step(trained)
    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randint(0, 7, (8, 3)), torch.randint(0, 3, (8,))))
        optimizer.step()


@script()
def muon_beside_adam(kit: Kit) -> None:
    def newton_schulz(g: Any) -> Any:
        x = g / (g.norm() + 1e-7)
        if g.size(0) > g.size(1):
            x = x.T
        for _ in range(3):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x.T if g.size(0) > g.size(1) else x

    class Muon(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.02})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p.grad))
                    buffer.lerp_(p.grad, 0.05)
                    update = newton_schulz(p.grad.lerp_(buffer, 0.95))
                    p.add_(update, alpha=-0.02 * max(1, p.size(0) / p.size(1)) ** 0.5)

    model = kit.model(Classifier())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [kit.optimizer(Muon(matrices)), kit.optimizer(torch.optim.AdamW(others, 1e-2))]
    train = kit.step(trained)
    for _ in range(3):
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        kit.note(train(model, *draw_batch()))
        for each in optimizers:
            each.step()


@script()
def lbfgs_with_closure(kit: Kit) -> None:
    model = kit.model(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = kit.optimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    )
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    @kit.step
    def compute(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    def closure() -> Any:
        optimizer.zero_grad()
        return compute(model, x, y).reduce_mean()

    for _ in range(2):
        kit.note(optimizer.step(closure))
