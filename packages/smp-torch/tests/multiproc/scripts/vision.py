"""Segmentation, classification, detection."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def segmentation_unet_with_dice(kit: Kit) -> None:
    class Double(nn.Sequential):
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__(
                nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out),
                nn.ReLU(inplace=True), nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
                nn.GroupNorm(2, n_out), nn.ReLU(inplace=True),
            )  # fmt: skip

    class Unet(nn.Module):
        def __init__(self, features: tuple[int, ...] = (2, 4)) -> None:
            super().__init__()
            self.downs, self.ups, self.pool = nn.ModuleList(), nn.ModuleList(), nn.MaxPool2d(2, 2)
            last = 1
            for width in features:
                self.downs.append(Double(last, width))
                last = width
            self.bottleneck = Double(last, last * 2)
            for width in reversed(features):
                self.ups.append(nn.ConvTranspose2d(width * 2, width, 2, 2))
                self.ups.append(Double(width * 2, width))
            self.final = nn.Conv2d(features[0], 1, 1)

        def forward(self, x: Any) -> Any:
            skips = []
            for down in self.downs:
                x = down(x)
                skips.append(x)
                x = self.pool(x)
            x = self.bottleneck(x)
            skips = skips[::-1]
            for i in range(0, len(self.ups), 2):
                x = self.ups[i](x)
                skip = skips[i // 2]
                if x.shape != skip.shape:
                    x = F.interpolate(x, size=skip.shape[2:])
                x = self.ups[i + 1](torch.cat((skip, x), dim=1))
            return self.final(x)

    model = kit.model(Unet())
    optimizer = kit.optimizer(torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        p = out.sigmoid()
        dice = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
        loss = F.binary_cross_entropy_with_logits(out, y) + dice
        model.backward(loss)
        return loss, ((p > 0.5) == y).double().mean()

    for _ in range(3):
        optimizer.zero_grad()
        loss, accuracy = train(
            model, torch.randn(4, 1, 9, 9), (torch.rand(4, 1, 9, 9) > 0.5).double()
        )
        optimizer.step()
        scheduler.step(accuracy.reduce_mean().item())
        kit.note(loss, accuracy, optimizer.param_groups[0]["lr"])


@script()
def resnet_with_zero_init_and_ordered_dict_head(kit: Kit) -> None:
    class Basic(nn.Module):
        expansion = 1

        def __init__(self, n_in: int, n_out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
            self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
            self.relu = nn.ReLU(inplace=True)
            self.downsample = (
                nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
                if stride != 1 or n_in != n_out
                else None
            )

        def forward(self, x: Any) -> Any:
            identity = x
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            if self.downsample is not None:
                identity = self.downsample(x)
            out += identity
            return self.relu(out)

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
            self.layer1, self.layer2 = self._make(4, 4, 2, 1), self._make(4, 8, 2, 2)
            self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
            self.fc = nn.Sequential(
                OrderedDict([("drop", nn.Dropout(0.0)), ("fc", nn.Linear(8, 5))])
            )
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
                if isinstance(m, Basic):
                    nn.init.constant_(m.bn2.weight, 0.2)

        def _make(self, n_in: int, n_out: int, blocks: int, stride: int) -> nn.Module:
            layers = [Basic(n_in, n_out, stride)]
            layers += [Basic(n_out, n_out, 1) for _ in range(1, blocks)]
            return nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            x = self.layer2(self.layer1(F.relu(self.conv1(x))))
            return self.fc(torch.flatten(self.avgpool(x), 1))

    model = kit.model(ResNet().to(memory_format=torch.channels_last))
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    meter = {"sum": 0.0, "count": 0}

    @kit.step
    def train(model: Any, x: Any, a: Any, b: Any, lam: Any) -> Any:
        out = model(x.to(memory_format=torch.channels_last))
        loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
        model.backward(loss)
        return loss, out.topk(2, 1)[1].eq(a.view(-1, 1)).any(1).double().mean()

    for _ in range(3):
        x, y = torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,))
        index = torch.randperm(8)
        lam = 0.3
        optimizer.zero_grad()
        loss, top = train(model, lam * x + (1 - lam) * x[index], y, y[index], lam)
        optimizer.step()
        scheduler.step()
        meter["sum"] += loss.reduce_mean().item() * 8
        meter["count"] += 8
        kit.note(top, meter["sum"] / meter["count"], scheduler.get_last_lr()[0])


@script()
def detector_with_anchors_and_matching(kit: Kit) -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
            )
            self.lateral, self.smooth = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, 1, 1)
            self.cls, self.box = nn.Conv2d(8, 2 * 3, 1), nn.Conv2d(8, 2 * 4, 1)
            nn.init.constant_(self.cls.bias, -2.0)
            self.register_buffer("anchors", torch.rand(2 * 4, 4), persistent=False)

        def forward(self, images: Any) -> Any:
            c3 = self.body(images)
            p3 = self.smooth(self.lateral(c3) + F.interpolate(F.max_pool2d(c3, 2), scale_factor=2))
            cls = self.cls(p3).permute(0, 2, 3, 1).reshape(len(images), -1, 3)
            box = self.box(p3).permute(0, 2, 3, 1).reshape(len(images), -1, 4)
            return {"logits": cls, "boxes": box + self.anchors}

    def focal(logits: Any, targets: Any) -> Any:
        p = logits.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        pt = p * targets + (1 - p) * (1 - targets)
        return ((0.25 * targets + 0.75 * (1 - targets)) * (1 - pt) ** 2 * ce).sum()

    model = kit.model(Detector())
    optimizer = kit.optimizer(
        torch.optim.SGD(
            [
                {"params": [p for n, p in model.named_parameters() if "body" in n], "lr": 1e-3},
                {"params": [p for n, p in model.named_parameters() if "body" not in n]},
            ],
            lr=1e-2,
        )
    )

    @kit.step
    def train(model: Any, images: Any, boxes: Any, labels: Any) -> Any:
        out = model(images)
        total: Any = 0
        for logits, predicted, own_boxes, own in zip(
            out["logits"], out["boxes"], boxes, labels, strict=True
        ):
            distance = torch.cdist(predicted.detach(), own_boxes)
            value, match = distance.min(1)
            fg = value < value.median()
            targets = torch.zeros_like(logits)
            targets[fg, own[match[fg]]] = 1.0
            total = total + focal(logits, targets) / fg.sum().clamp(min=1)
            total = total + F.smooth_l1_loss(predicted[fg], own_boxes[match[fg]], beta=0.1)
        loss = total / len(images)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(
            train(model, torch.randn(4, 3, 8, 8), torch.rand(4, 2, 4), torch.randint(0, 3, (4, 2)))
        )
        optimizer.step()


@script()
def detr_queries_with_auxiliary_losses(kit: Kit) -> None:
    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 4, 4)
            self.query = nn.Embedding(4, 8)
            self.row, self.col = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(2, 4))
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.decoder = nn.ModuleList(
                nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
            )
            self.classes, self.boxes = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            h = self.conv(x)
            height, width = h.shape[-2:]
            pos = torch.cat(
                [
                    self.col[:width].unsqueeze(0).repeat(height, 1, 1),
                    self.row[:height].unsqueeze(1).repeat(1, width, 1),
                ],
                dim=-1,
            ).flatten(0, 1)
            memory = self.encoder(pos.unsqueeze(0) + 0.1 * h.flatten(2).permute(0, 2, 1))
            out = self.query.weight.unsqueeze(0).repeat(len(x), 1, 1)
            outs = []
            for layer in self.decoder:
                out = layer(out, memory)
                outs.append({"logits": self.classes(out), "boxes": self.boxes(out).sigmoid()})
            return {**outs[-1], "aux": outs[:-1]}

    def criterion(out: Any, boxes: Any, labels: Any) -> Any:
        cost = torch.cdist(out["boxes"].flatten(0, 1), boxes.flatten(0, 1), p=1)
        n, q = out["boxes"].shape[:2]
        cost = cost.view(n, q, -1)
        total: Any = 0
        for i in range(n):
            own = cost[i, :, i * boxes.shape[1] : (i + 1) * boxes.shape[1]]
            index = own.detach().argmin(0)
            target = torch.full((q,), 3)
            target[index] = labels[i]
            total = total + F.cross_entropy(out["logits"][i], target, weight=WEIGHTS.to(cost.dtype))
            total = total + 5 * F.l1_loss(out["boxes"][i, index], boxes[i])
        return total / n

    WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 0.1])
    model = kit.model(Detr())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, x: Any, boxes: Any, labels: Any) -> Any:
        out = model(x)
        losses = {"loss": criterion(out, boxes, labels)}
        for i, aux in enumerate(out["aux"]):
            losses[f"loss_{i}"] = criterion(aux, boxes, labels)
        loss = sum(losses.values())
        model.backward(loss)
        return {k: v.detach() for k, v in losses.items()}

    for _ in range(2):
        optimizer.zero_grad()
        found = train(
            model, torch.randn(4, 3, 8, 8), torch.rand(4, 2, 4), torch.randint(0, 3, (4, 2))
        )
        kit.note(*found.values())
        kit.note(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()


@script()
def vision_transformer_with_class_token_and_layer_scale(kit: Kit) -> None:
    class DropPath(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, x: Any) -> Any:
            if self.p == 0.0 or not self.training:
                return x
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            return x.div(1 - self.p) * x.new_empty(shape).bernoulli_(1 - self.p)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.gamma1 = nn.Parameter(0.1 * torch.ones(8))
            self.gamma2 = nn.Parameter(0.1 * torch.ones(8))
            self.drop_path = DropPath(0.0)

        def forward(self, x: Any) -> Any:
            b, n, c = x.shape
            qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).reshape(b, n, c)
            x = x + self.drop_path(self.gamma1 * self.proj(out))
            return x + self.drop_path(self.gamma2 * self.mlp(self.norm2(x)))

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 8, 4, 4)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.pos_embed = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

        def no_weight_decay(self) -> set[str]:
            return {"pos_embed", "cls_token"}

        def forward(self, x: Any) -> Any:
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
            return self.head(self.norm(self.blocks(x))[:, 0])

    net = Vit()
    model = kit.model(net)
    groups: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        depth = int(name.split("blocks.")[1][0]) + 1 if "blocks." in name else 0
        decay = 0.0 if p.ndim == 1 or name.split(".")[-1] in net.no_weight_decay() else 0.05
        key = f"{depth}-{decay}"
        groups.setdefault(
            key, {"params": [], "weight_decay": decay, "lr": 1e-2 * 0.75 ** (4 - depth)}
        )["params"].append(p)
    optimizer = kit.optimizer(torch.optim.AdamW(list(groups.values())))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = torch.sum(-y * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        y = F.one_hot(torch.randint(0, 5, (4,)), 5) * 0.9 + 0.02
        kit.note(train(model, torch.randn(4, 3, 8, 8), y))
        optimizer.step()


@script()
def slot_attention_with_inputs_in_a_namedtuple(kit: Kit) -> None:
    class Views(NamedTuple):
        image: Any
        start: Any

    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm_slots = nn.LayerNorm(6), nn.LayerNorm(6)
            self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))
            self.gru = nn.GRUCell(6, 6)
            self.mlp = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
            self.embed, self.decode = nn.Linear(3, 6), nn.Linear(6, 3 + 1)
            self.mu, self.sigma = (
                nn.Parameter(torch.randn(1, 1, 6)),
                nn.Parameter(torch.zeros(1, 1, 6)),
            )

        def forward(self, views: Any) -> Any:
            x = self.norm(self.embed(views.image))
            slots = self.mu + self.sigma.exp() * views.start
            k, v = self.k(x), self.v(x)
            for _ in range(2):
                q = self.q(self.norm_slots(slots))
                attn = torch.softmax(torch.einsum("bid,bjd->bij", q, k) * 6**-0.5, dim=1) + 1e-8
                attn = attn / attn.sum(-1, keepdim=True)
                updates = attn @ v
                slots = self.gru(updates.reshape(-1, 6), slots.reshape(-1, 6)).view_as(slots)
                slots = slots + self.mlp(slots)
            out = self.decode(slots.unsqueeze(2) + x.unsqueeze(1))
            rgb, mask = out.split([3, 1], -1)
            return (rgb * mask.softmax(1)).sum(1)

    model = kit.model(Slots())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 4e-3))

    @kit.step
    def train(model: Any, views: Any) -> Any:
        loss = F.mse_loss(model(views), views.image)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, Views(torch.randn(4, 5, 3), torch.randn(4, 2, 6))))
        optimizer.step()
