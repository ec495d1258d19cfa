"""Models that learn from models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script
from scripts.small import mlp


@script()
def dino_with_centering_and_frozen_last_layer(kit: Kit) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp(8, 8, 6)
            self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 10, bias=False))
            self.last_layer.parametrizations.weight.original0.data.fill_(1)
            self.last_layer.parametrizations.weight.original0.requires_grad = False

        def forward(self, x: Any) -> Any:
            return self.last_layer(F.normalize(self.mlp(x), dim=-1))

    def build() -> nn.Module:
        return nn.Sequential(mlp(6, 12, 8), Head())

    student_net, teacher_net = build(), build()
    teacher_net.load_state_dict(student_net.state_dict())
    student, teacher = kit.model(student_net), kit.model(teacher_net.requires_grad_(False))
    optimizer = kit.optimizer(torch.optim.SGD(student.parameters(), 0.1))

    @kit.step(non_split_inputs=["center"])
    def train(student: Any, teacher: Any, a: Any, b: Any, center: Any) -> Any:
        with torch.no_grad():
            t1, t2 = teacher(a), teacher(b)
        total: Any = 0
        for t, s in ((t1, student(b)), (t2, student(a))):
            target = F.softmax((t - center) / 0.04, dim=-1).detach()
            total = total + torch.sum(-target * F.log_softmax(s / 0.1, dim=-1), dim=-1).mean()
        loss = total / 2
        student.backward(loss)
        return loss, torch.cat([t1, t2]).mean(0, keepdim=True)

    center = torch.zeros(1, 10)
    for number in range(3):
        optimizer.zero_grad()
        loss, batch_center = train(
            student, teacher, torch.randn(8, 6), torch.randn(8, 6), center=center
        )
        center = center * 0.9 + batch_center.reduce_mean() * 0.1
        if number < 1:  # cancel gradients of the last layer in the first epoch
            for name, p in student.named_parameters():
                if "last_layer" in name:
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            for ps, pt in zip(student_net.parameters(), teacher_net.parameters(), strict=True):
                pt.data.mul_(0.9).add_((1 - 0.9) * ps.detach().data)
        kit.note(loss)
    kit.note(center)


@script()
def distillation_with_hooked_features(kit: Kit) -> None:
    teacher, student = mlp(6, 16, 16, 4), mlp(6, 8, 8, 4)
    teacher.eval()
    adapter = nn.Linear(8, 16)
    features: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            features[name] = output

        return hook

    teacher[2].register_forward_hook(keep("teacher"))
    student[2].register_forward_hook(keep("student"))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.adapter = student, adapter

        def forward(self, x: Any) -> Any:
            logits = self.student(x)
            return logits, self.adapter(features["student"])

    model = kit.model(Both())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, y: Any, t_logits: Any, t_feature: Any) -> Any:
        logits, hint = model(x)
        soft = F.kl_div(
            F.log_softmax(logits / 2, 1), F.log_softmax(t_logits / 2, 1), log_target=True,
            reduction="batchmean",
        )  # fmt: skip
        loss = 0.5 * F.cross_entropy(logits, y, label_smoothing=0.1) + 2 * soft
        loss = loss + 0.1 * F.mse_loss(hint, t_feature)
        model.backward(loss)
        return loss

    for _ in range(3):
        x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
        with torch.inference_mode():
            logits = teacher(x)
        optimizer.zero_grad()
        kit.note(train(model, x, y, logits.clone(), features["teacher"].clone()))
        optimizer.step()


@script()
def deep_mutual_learning_and_averaged_teacher(kit: Kit) -> None:
    one, two = kit.model(mlp(6, 12, 3)), kit.model(mlp(6, 10, 10, 3))
    opt1 = kit.optimizer(torch.optim.SGD(one.parameters(), 0.1))
    opt2 = kit.optimizer(torch.optim.Adagrad(two.parameters(), 0.1))

    @kit.step
    def train(one: Any, two: Any, x: Any, y: Any) -> Any:
        a, b = one(x), two(x)
        kl = nn.KLDivLoss(reduction="batchmean")
        la = F.cross_entropy(a, y) + kl(F.log_softmax(a, 1), F.softmax(b.detach(), 1))
        lb = F.cross_entropy(b, y) + kl(F.log_softmax(b, 1), F.softmax(a.detach(), 1))
        one.backward(la)
        two.backward(lb)
        return la, lb

    for _ in range(3):
        opt1.zero_grad()
        opt2.zero_grad()
        kit.note(*train(one, two, torch.randn(8, 6), torch.randint(0, 3, (8,))))
        opt1.step()
        opt2.step()


@script()
def mean_teacher_whose_targets_are_made_between_steps(kit: Kit) -> None:
    net = mlp(6, 12, 12, 3)
    teacher = copy.deepcopy(net)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9))

    @kit.step
    def train(model: Any, x: Any, y: Any, target: Any, weight: float) -> Any:
        out = model(x)
        consistency = F.mse_loss(out.softmax(1), target)
        loss = F.cross_entropy(out, y) + weight * consistency
        model.backward(loss)
        return loss, consistency

    for number in range(3):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        with torch.no_grad():
            target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        optimizer.zero_grad()
        kit.note(*train(model, x, y, target, min(1.0, number / 2)))
        optimizer.step()
        alpha = min(1 - 1 / (number + 1), 0.9)
        for average, p in zip(teacher.parameters(), net.parameters(), strict=True):
            average.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
