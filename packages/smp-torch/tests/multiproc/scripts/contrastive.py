"""Self-supervision, distillation, and losses between models."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script
from scripts.small import mlp


@script()
def simclr_nt_xent(kit: Kit) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projector = mlp(6, 12, 8), mlp(8, 8, 4)

        def forward(self, x: Any) -> Any:
            return F.normalize(self.projector(self.backbone(x)), dim=1)

    model = kit.model(Encoder())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True))

    @kit.step
    def train(model: Any, a: Any, b: Any) -> Any:
        z = model(torch.cat([a, b]))
        sim = z @ z.t() / 0.5
        sim.fill_diagonal_(-1e9)
        n = len(a)
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        loss = F.cross_entropy(sim, target)
        model.backward(loss)
        return loss

    for _ in range(3):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        kit.note(train(model, x + 0.1 * torch.randn_like(x), x * (torch.rand(8, 6) > 0.2)))
        optimizer.step()


@script()
def moco_with_queue_and_key_encoder_between_steps(kit: Kit) -> None:
    query = mlp(6, 12, 4)
    key = copy.deepcopy(query)
    for p in key.parameters():
        p.requires_grad = False
    model = kit.model(query)
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    queue = F.normalize(torch.randn(4, 16), dim=0)
    pointer = 0

    @kit.step(non_split_inputs=["queue"])
    def train(model: Any, x: Any, k: Any, queue: Any) -> Any:
        q = F.normalize(model(x), dim=1)
        pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", q, queue)
        logits = torch.cat([pos, neg], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        model.backward(loss)
        return loss

    for _ in range(3):
        x = torch.randn(8, 6)
        with torch.no_grad():
            for pk, pq in zip(key.parameters(), query.parameters(), strict=True):
                pk.data = pk.data * 0.9 + pq.data * 0.1
            k = F.normalize(key(x + 0.1), dim=1)
        optimizer.zero_grad()
        kit.note(train(model, x, k, queue=queue))
        optimizer.step()
        queue[:, pointer : pointer + 8] = k.T
        pointer = (pointer + 8) % 16


@script()
def moco_in_one_module_written_in_the_step(kit: Kit) -> None:
    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_q, self.encoder_k = mlp(6, 12, 4), mlp(6, 12, 4)
            self.encoder_k.load_state_dict(self.encoder_q.state_dict())
            for p in self.encoder_k.parameters():
                p.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(4, 16), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _momentum(self) -> None:
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1

        @torch.no_grad()
        def _enqueue(self, keys: Any) -> None:
            ptr = int(self.ptr)
            self.queue[:, ptr : ptr + len(keys)] = keys.T
            self.ptr[0] = (ptr + len(keys)) % 16

        def forward(self, a: Any, b: Any) -> Any:
            q = F.normalize(self.encoder_q(a), dim=1)
            with torch.no_grad():
                self._momentum()
                k = F.normalize(self.encoder_k(b), dim=1)
            pos = (q * k).sum(1, keepdim=True)
            logits = torch.cat([pos, q @ self.queue.clone().detach()], 1) / 0.2
            self._enqueue(k)
            return logits, torch.zeros(len(a), dtype=torch.long)

    model = kit.model(Moco())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, a: Any, b: Any) -> Any:
        logits, labels = model(a, b)
        loss = F.cross_entropy(logits, labels)
        model.backward(loss)
        return loss

    for _ in range(3):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        kit.note(train(model, x, x + 0.1))
        optimizer.step()


@script()
def byol_with_target_in_the_module(kit: Kit) -> None:
    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(
                nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6)
            )
            self.predictor = mlp(6, 8, 6)
            self.target = copy.deepcopy(self.online)
            self.target.requires_grad_(False)

        @torch.no_grad()
        def update_target(self, tau: float) -> None:
            for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
                t.data.lerp_(o.data, 1 - tau)

        def forward(self, a: Any, b: Any) -> Any:
            p, q = self.predictor(self.online(a)), self.predictor(self.online(b))
            with torch.no_grad():
                s, t = self.target(b), self.target(a)
            loss = 4 - 2 * F.cosine_similarity(p, s, -1) - 2 * F.cosine_similarity(q, t, -1)
            return loss.mean()

    net = Byol()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, a: Any, b: Any) -> Any:
        loss = model(a, b)
        model.backward(loss)
        return loss

    for number in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randn(8, 6)))
        optimizer.step()
        net.update_target(1 - (1 - 0.9) * (math.cos(math.pi * number / 3) + 1) / 2)


@script()
def clip_with_clamped_logit_scale(kit: Kit) -> None:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = nn.Sequential(
                nn.Conv2d(3, 4, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8)
            )
            self.token_embedding = nn.Embedding(10, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
            self.text = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.text_projection = nn.Parameter(torch.randn(8, 8) * 8**-0.5)
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def encode_text(self, ids: Any) -> Any:
            x = self.text(self.token_embedding(ids))
            return x[torch.arange(len(x)), ids.argmax(-1)] @ self.text_projection

        def forward(self, image: Any, ids: Any) -> Any:
            i, t = (
                F.normalize(self.visual(image), dim=-1),
                F.normalize(self.encode_text(ids), dim=-1),
            )
            logits = self.logit_scale.exp() * i @ t.t()
            return logits, logits.t()

    net = Clip()
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.2))

    @kit.step
    def train(model: Any, image: Any, ids: Any) -> Any:
        per_image, per_text = model(image, ids)
        labels = torch.arange(len(image))
        loss = (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 3, 4, 4), torch.randint(0, 10, (8, 5))))
        optimizer.step()
        with torch.no_grad():
            net.logit_scale.clamp_(0, math.log(100))
    kit.note(net.logit_scale.exp().item())


@script()
def barlow_twins_off_diagonal(kit: Kit) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projector = mlp(6, 12, 8), mlp(8, 8, 4)
            self.bn = nn.BatchNorm1d(4, affine=False)

        def forward(self, a: Any, b: Any) -> Any:
            z1, z2 = self.projector(self.backbone(a)), self.projector(self.backbone(b))
            c = self.bn(z1).T @ self.bn(z2)
            c.div_(len(a))
            on = torch.diagonal(c).add_(-1).pow_(2).sum()
            n, _ = c.shape
            off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum()
            return on + 0.005 * off

    model = kit.model(Twins())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, a: Any, b: Any) -> Any:
        loss = model(a, b)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randn(8, 6)))
        optimizer.step()


@script()
def triplets_with_hard_mining_and_center_loss(kit: Kit) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = mlp(6, 12, 4)
            self.centers = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Any, y: Any) -> Any:
            z = self.embed(x)
            center = (z - self.centers[y]).pow(2).sum(1).clamp(1e-12, 1e12).mean()
            distance = torch.cdist(z, z) + torch.eye(len(z)) * 1e-6
            same = y[:, None].eq(y[None])
            hardest = (distance * same).max(1).values
            easiest = distance.masked_fill(same, float("inf")).min(1).values
            easiest = torch.where(torch.isinf(easiest), torch.zeros_like(easiest) + 9, easiest)
            return F.relu(hardest - easiest + 0.3).mean(), center

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))
    history = []

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        triplet, center = model(x, y)
        loss = triplet + 0.005 * center
        model.backward(loss)
        return loss, triplet

    for _ in range(3):
        optimizer.zero_grad()
        loss, triplet = train(model, torch.randn(8, 6), torch.arange(8) % 3)
        history.append(float(triplet.reduce_mean()))
        optimizer.step()
        kit.note(loss, sum(history) / len(history))


@script()
def arcface_head_with_labels_in_the_forward(kit: Kit) -> None:
    class ArcFace(nn.Module):
        def __init__(self, width: int, classes: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(classes, width))
            nn.init.xavier_uniform_(self.weight)
            self.cos_m, self.sin_m = math.cos(0.5), math.sin(0.5)
            self.th, self.mm = math.cos(math.pi - 0.5), math.sin(math.pi - 0.5) * 0.5

        def forward(self, x: Any, label: Any) -> Any:
            cosine = F.linear(F.normalize(x), F.normalize(self.weight))
            sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-9, 1))
            phi = cosine * self.cos_m - sine * self.sin_m
            phi = torch.where(cosine > self.th, phi, cosine - self.mm)
            one_hot = torch.zeros_like(cosine)
            one_hot.scatter_(1, label.view(-1, 1).long(), 1)
            return (one_hot * phi + (1.0 - one_hot) * cosine) * 8.0

    class Face(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 4))
            self.head = ArcFace(4, 5)

        def forward(self, x: Any, label: Any = None) -> Any:
            x = self.backbone(x)
            return x if label is None else self.head(x, label)

    model = kit.model(Face())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, weight_decay=5e-4))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        logits = model(x, y)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss

    @kit.step
    def embed(model: Any, x: Any) -> Any:
        return model(x)

    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randint(0, 5, (8,))))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            z = F.normalize(embed(model, torch.ones(4, 6)).concat())
        kit.note((z @ z.t()).sum())
