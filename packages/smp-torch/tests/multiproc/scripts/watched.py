"""What scripts look at while they train, and what they do about it."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script, single
from scripts.small import Classifier, draw_batch, trained


@script()
def learning_rate_finder_that_restores(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 1e-4, 0.9))
    train = kit.step(trained)
    optimizer.zero_grad()
    train(model, *draw_batch())
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    best, smooth, rate = math.inf, 0.0, 1e-4
    for number in range(1, 5):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = train(model, *draw_batch()).reduce_mean().item()
        optimizer.step()
        smooth = 0.9 * smooth + 0.1 * loss
        corrected = smooth / (1 - 0.9**number)
        if number > 1 and corrected > 4 * best:
            break
        best, rate = min(best, corrected), rate * 10
        kit.note(corrected)
    model.load_state_dict(before)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    kit.note(train(model, *draw_batch()))
    optimizer.step()


@single(tolerance=5e-3)
def autocast_in_the_step(kit: Kit) -> None:
    model = kit.model(Classifier(16))
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.05))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = F.cross_entropy(out, y)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()


@script()
def metrics_kept_in_the_module(kit: Kit) -> None:
    class Accuracy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("correct", torch.tensor(0.0))
            self.register_buffer("total", torch.tensor(0.0))

        def update(self, out: Any, y: Any) -> None:
            self.correct += (out.argmax(-1) == y).sum()
            self.total += y.numel()

        def compute(self) -> Any:
            return self.correct / self.total

        def reset(self) -> None:
            self.correct.zero_()
            self.total.zero_()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.accuracy, self.seen = Classifier(), Accuracy(), 0
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x: Any, y: Any) -> Any:
            out = self.net(x)
            with torch.no_grad():
                self.accuracy.update(out, y)
            self.step += 1
            return F.cross_entropy(out, y)

    net = Net()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = model(x, y)
        model.backward(loss)
        return loss

    for number in range(3):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
        kit.note(net.accuracy.compute().item())
        if number == 1:
            net.accuracy.reset()


@script()
def skips_bad_batches_and_logs_norms(kit: Kit) -> None:
    model = kit.model(Classifier())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9))
    train = kit.step(trained)
    skipped = 0
    for number in range(4):
        x, y = draw_batch()
        if number == 1:
            x[0, 0] = float("nan")
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.zero_grad()
        try:
            loss = train(model, x, y)
            if not torch.isfinite(loss.reduce_mean()):
                raise FloatingPointError("loss is not finite")
        except FloatingPointError:
            skipped += 1
            model.load_state_dict(saved)
            continue
        for name, p in model.named_parameters():
            if "weight" in name and p.grad is not None:
                kit.note(p.grad.norm().item(), p.data.abs().mean().item())
        optimizer.step()
        kit.note(loss, skipped)


@script()
def hooks_that_register_statistics(kit: Kit) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    stats: dict[str, list[float]] = {}

    def forward_hook(name: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            stats.setdefault(name, []).append((out <= 0).double().mean().item())

        return hook

    handles = [
        m.register_forward_hook(forward_hook(n))
        for n, m in net.named_modules()
        if isinstance(m, nn.ReLU)
    ]
    for p in net.parameters():
        p.register_hook(lambda g: g.clamp(-0.05, 0.05))
    net[0].register_full_backward_hook(lambda m, gi, go: None)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    train = kit.step(trained)
    for number in range(3):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
        kit.note(*(sum(each) / len(each) for each in stats.values()))
        if number == 1:
            for handle in handles:
                handle.remove()
            stats = {"none": [0.0]}


@script()
def lottery_ticket_by_masks(kit: Kit) -> None:
    net = Classifier()
    initial = copy.deepcopy(net.state_dict())
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    train = kit.step(trained)
    masks: dict[str, Any] = {}
    for _ in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            kit.note(train(model, *draw_batch()))
            for name, p in net.named_parameters():
                if name in masks:
                    p.grad *= masks[name]
            optimizer.step()
        state = model.state_dict()
        for name, w in state.items():
            if w.dim() == 2:
                alive = w.abs().flatten().sort().values
                masks[name] = (w.abs() >= alive[len(alive) // 4]).double()
        restart = {k: v * masks.get(k, 1) for k, v in initial.items() if v.is_floating_point()}
        model.load_state_dict({**state, **restart})


@script()
def fisher_and_snr_logged_each_step_with_numpy(kit: Kit) -> None:
    model = kit.model(Classifier())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))
    train, history = kit.step(trained), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = train(model, *draw_batch())
        grads = [p.grad.detach().cpu().numpy() for p in model.parameters() if p.grad is not None]
        total = float(np.sqrt(sum((g**2).sum() for g in grads)))
        history.append({"loss": float(loss.reduce_mean()), "norm": total})
        if total > 1.0:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(1.0 / total)
        optimizer.step()
        kit.note(*history[-1].values())


@script(draws=True)
def stochastic_depth_by_python_random(kit: Kit) -> None:
    import random

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            for i, layer in enumerate(self.layers):
                if self.training and random.random() < 0.3 * i / 4:
                    continue
                x = x + torch.relu(layer(x))
            return self.head(x)

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    train = kit.step(trained)
    for _ in range(4):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()


@script()
def swapped_heads_and_growing_net(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    train = kit.step(trained)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    optimizer.zero_grad()
    kit.note(train(model, *draw_batch()))
    optimizer.step()
    with torch.no_grad():
        nn.init.zeros_(net.head.bias)
        nn.init.xavier_normal_(net.head.weight)
    net.encoder[1].reset_running_stats()
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.05))
    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()


@script()
def context_managers_around_the_step(kit: Kit) -> None:
    @contextlib.contextmanager
    def frozen(module: Any) -> Any:
        kept = [p.requires_grad for p in module.parameters()]
        module.requires_grad_(False)
        try:
            yield
        finally:
            for p, was in zip(module.parameters(), kept, strict=True):
                p.requires_grad_(was)

    net = Classifier()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    train = kit.step(trained)
    for number in range(3):
        optimizer.zero_grad()
        with frozen(net.head) if number % 2 else torch.enable_grad():
            kit.note(train(model, *draw_batch()))
        optimizer.step()
