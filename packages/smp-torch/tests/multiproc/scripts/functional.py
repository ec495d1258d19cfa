"""Functions with gradients of their own, transforms, and weights that are put in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def maml_with_functional_call(kit: Kit) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, xs: Any, ys: Any, xq: Any, yq: Any) -> Any:
        params = dict(net.named_parameters())
        loss = F.mse_loss(functional_call(net, params, (xs,)), ys)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        outer = F.mse_loss(functional_call(net, fast, (xq,)), yq)
        model.backward(outer)
        return outer

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(
            train(model, torch.randn(8, 3), torch.randn(8, 1), torch.randn(8, 3), torch.randn(8, 1))
        )
        optimizer.step()


@script()
def reptile_by_weights_between_steps(kit: Kit) -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = kit.model(net)

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = (model(x) - y).pow(2).mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        before = copy.deepcopy(net.state_dict())
        for _ in range(2):
            model.zero_grad()
            x = torch.rand(8, 1)
            kit.note(train(model, x, torch.sin(3 * x)))
            for p in net.parameters():
                p.data -= 0.02 * p.grad.data
        after = net.state_dict()
        net.load_state_dict({k: before[k] + (after[k] - before[k]) * 0.5 for k in before})


@script()
def per_sample_gradients_on_the_side(kit: Kit) -> None:
    """Differential privacy by a plain model's transforms, beside one that is trained."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    scorer = nn.Linear(6, 1)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return (functional_call(scorer, params, (x.unsqueeze(0),)).squeeze() - y).pow(2)

    @kit.step
    def train(model: Any, x: Any, y: Any, weight: Any) -> Any:
        loss = (weight * F.cross_entropy(model(x), y, reduction="none")).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        params = {k: v.detach() for k, v in scorer.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y.double())
        weight = 1 / (1 + each["weight"].flatten(1).norm(dim=1))
        optimizer.zero_grad()
        kit.note(train(model, x, y, weight))
        optimizer.step()


@script()
def custom_function_with_saved_tensors_and_two_gradients(kit: Kit) -> None:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, beta: Any) -> Any:
            ctx.save_for_backward(x, beta)
            return x * torch.sigmoid(beta * x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, beta = ctx.saved_tensors
            s = torch.sigmoid(beta * x)
            return grad * (s + beta * x * s * (1 - s)), (grad * x * x * s * (1 - s)).sum()

    class Act(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Any) -> Any:
            return Swish.apply(x, self.beta)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.act = Act()

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = self.act(layer(x))
            return Swish.apply(x, self.act.beta).sum(1)

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randn(8)))
        optimizer.step()


@script()
def saliency_regularization_with_retained_gradients(kit: Kit) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            self.kept = F.relu(self.features(x))
            self.kept.retain_grad()
            return self.head(self.kept.mean((2, 3)))

    net = Net()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        loss = F.cross_entropy(out, y)
        model.backward(loss)
        cam = (net.kept.grad.mean((2, 3), keepdim=True) * net.kept.detach()).sum(1).relu()
        return loss, cam.mean()

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(*train(model, torch.randn(4, 1, 5, 5), torch.randint(0, 3, (4,))))
        optimizer.step()


@script()
def branches_by_the_loss_inside_the_step(kit: Kit) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.5))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        assert not torch.isnan(out).any(), "activations are not finite"
        loss = F.cross_entropy(out, y)
        if loss > 1.1:
            loss = loss * 0.5
        elif loss.item() < 0.2:
            loss = loss + 1
        print(f"loss: {loss.item():.3f}")
        model.backward(loss)
        return loss

    for _ in range(4):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randint(0, 3, (8,))))
        optimizer.step()


@script()
def mixup_cutmix_with_masks_and_ragged_lists(kit: Kit) -> None:
    class Boxes:
        """One tensor an example, of its own length."""

        def __init__(self, tensors: Any) -> None:
            self.tensors = list(tensors)

        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            size = len(self.tensors) // num_mb
            return Boxes(self.tensors[mb * size : (mb + 1) * size])

    class DeepSets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phi = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
            self.rho = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, sets: Any) -> Any:
            sizes = [len(each) for each in sets]
            h = self.phi(torch.cat(sets))
            return self.rho(torch.stack([part.sum(0) for part in h.split(sizes)])).squeeze(-1)

    model = kit.model(DeepSets())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, y: Any, boxes: Any) -> Any:
        loss = F.mse_loss(model(boxes.tensors), y)
        model.backward(loss)
        return loss

    for number in range(3):
        sets = [torch.randn(2 + (i + number) % 3, 3) for i in range(4)]
        optimizer.zero_grad()
        kit.note(train(model, torch.tensor([each.sum() for each in sets]), Boxes(sets)))
        optimizer.step()
