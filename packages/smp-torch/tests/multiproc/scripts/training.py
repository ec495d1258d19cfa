"""Habits of training loops: schedules, averages, checkpoints, frozen parts, hand-made updates."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from scripts.kit import Kit, script
from scripts.small import Classifier, draw_batch, trained


@script()
def lightning_like_module_with_trainer(kit: Kit) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()
            self.logged: dict[str, Any] = {}

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, model: Any, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(model(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)

        def log(self, name: str, value: Any) -> None:
            self.logged[name] = value

    class Trainer:
        def fit(self, module: Any, loader: Any) -> None:
            model = kit.model(module)
            optimizer, scheduler = module.configure_optimizers()
            optimizer = kit.optimizer(optimizer)

            @kit.step
            def step(model: Any, batch: Any, batch_idx: int) -> Any:
                loss = module.training_step(model, batch, batch_idx)
                model.backward(loss)
                return loss

            for _ in range(2):
                for index, batch in enumerate(loader):
                    optimizer.zero_grad()
                    module.log("loss", step(model, batch, index).reduce_mean().item())
                    optimizer.step()
                    kit.note(module.logged["loss"])
                scheduler.step()

    data = TensorDataset(*draw_batch(16))
    Trainer().fit(Module(), DataLoader(data, batch_size=8, shuffle=True))


@script()
def accumulation_by_hand_over_three_batches(kit: Kit) -> None:
    model = kit.model(Classifier())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y) / 3
        model.backward(loss)
        return loss

    optimizer.zero_grad()
    for number in range(7):
        kit.note(train(model, *draw_batch()).reduce_mean() * 3)
        if (number + 1) % 3 == 0 or number == 6:
            kit.note(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@script()
def swa_with_bn_update(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9))
    averaged, scheduler = AveragedModel(net), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    train = kit.step(trained)
    for number in range(4):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
        if number >= 2:
            averaged.update_parameters(net)
            scheduler.step()
    with torch.no_grad():
        norms = [p.norm() for p in averaged.parameters()]
    kit.note(sum(n.item() for n in norms))


@script()
def ema_by_averaged_model_evaluated_by_swap(kit: Kit) -> None:
    net = Classifier()
    model = kit.model(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9))
    train = kit.step(trained)

    @kit.step
    def evaluate(model: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x), y)

    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
        ema.update_parameters(net)
        backup = copy.deepcopy(model.state_dict())
        model.load_state_dict(ema.module.state_dict())
        model.eval()
        with torch.no_grad():
            kit.note(evaluate(model, *draw_batch()))
        model.load_state_dict(backup)


@script()
def resumed_from_a_file_with_optimizer_and_scheduler(kit: Kit) -> None:
    def build() -> Any:
        model = kit.model(Classifier())
        optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    train = kit.step(trained)
    model, optimizer, scheduler = build()
    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    if kit.is_first():
        torch.save(state, kit.folder / "last.pt")
    kit.barrier()
    loaded = torch.load(kit.folder / "last.pt", weights_only=False)
    model, optimizer, scheduler = build()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"])
    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
        scheduler.step()


@script()
def best_weights_kept_and_restored_with_patience(kit: Kit) -> None:
    class EarlyStopping:
        def __init__(self, patience: int) -> None:
            self.patience, self.counter, self.best = patience, 0, math.inf
            self.weights: Any = None

        def __call__(self, loss: float, model: Any) -> bool:
            if loss < self.best:
                self.best, self.counter = loss, 0
                self.weights = {k: v.clone() for k, v in model.state_dict().items()}
            else:
                self.counter += 1
            return self.counter >= self.patience

    model = kit.model(Classifier())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 2.0))
    train, stopping = kit.step(trained), EarlyStopping(2)

    @kit.step
    def validate(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        return F.cross_entropy(out, y), out.argmax(1)

    validation = draw_batch()
    for _ in range(6):
        model.train()
        optimizer.zero_grad()
        train(model, *draw_batch())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss, predicted = validate(model, *validation)
        kit.note((predicted.concat() == validation[1]).double().mean())
        if stopping(loss.reduce_mean().item(), model):
            break
    model.load_state_dict(stopping.weights)


@script()
def gradual_unfreezing_with_added_groups(kit: Kit) -> None:
    net = Classifier()
    for p in [*net.encoder.parameters(), *net.middle.parameters()]:
        p.requires_grad = False
    net.encoder[1].eval()
    model = kit.model(net)
    optimizer = kit.optimizer(
        torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.1, 0.9)
    )
    train = kit.step(trained)
    for number in range(4):
        if number == 1:
            for p in net.middle.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": list(net.middle.parameters()), "lr": 0.01})
        if number == 3:
            net.encoder.requires_grad_(True)
            optimizer.add_param_group({"params": list(net.encoder.parameters()), "lr": 0.001})
            net.encoder.train()
        optimizer.zero_grad()
        kit.note(train(model, *draw_batch()))
        optimizer.step()
