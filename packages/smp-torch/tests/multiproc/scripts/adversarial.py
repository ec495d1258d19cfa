"""Adversarial networks, penalties on gradients, and adversarial examples."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

from scripts.kit import Kit, script


def _generator(noise: int = 4, size: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Linear(noise, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, size), nn.Tanh()
    )


def _critic(size: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Linear(size, 16), nn.LeakyReLU(0.2, True), nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 1)
    )


@script()
def gan_with_labels_and_detach(kit: Kit) -> None:
    g, d = kit.model(_generator()), kit.model(_critic())
    og = kit.optimizer(torch.optim.Adam(g.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    od = kit.optimizer(torch.optim.Adam(d.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    bce = nn.BCEWithLogitsLoss()

    @kit.step
    def d_step(g: Any, d: Any, real: Any, z: Any) -> Any:
        fake = g(z).detach()
        real_out, fake_out = d(real), d(fake)
        loss = bce(real_out, torch.full_like(real_out, 0.9)) + bce(
            fake_out, torch.zeros_like(fake_out)
        )
        d.backward(loss)
        return loss

    @kit.step
    def g_step(g: Any, d: Any, z: Any) -> Any:
        out = d(g(z))
        loss = bce(out, torch.ones_like(out))
        g.backward(loss)
        return loss

    for _ in range(3):
        real = torch.randn(8, 6)
        od.zero_grad()
        d_loss = d_step(g, d, real, torch.randn(8, 4))
        od.step()
        og.zero_grad()
        g_loss = g_step(g, d, torch.randn(8, 4))
        og.step()
        kit.note(d_loss, g_loss)


@script()
def wgan_with_gradient_penalty(kit: Kit) -> None:
    g, d = kit.model(_generator()), kit.model(_critic())
    og = kit.optimizer(torch.optim.RMSprop(g.parameters(), lr=1e-3))
    od = kit.optimizer(torch.optim.RMSprop(d.parameters(), lr=1e-3))

    def penalty(d: Any, real: Any, fake: Any, alpha: Any) -> Any:
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = d(mixed)
        (grads,) = torch.autograd.grad(
            out, mixed, grad_outputs=torch.ones_like(out), create_graph=True, retain_graph=True
        )
        return ((grads.view(len(grads), -1).norm(2, dim=1) - 1) ** 2).mean()

    @kit.step
    def critic_step(g: Any, d: Any, real: Any, z: Any, alpha: Any) -> Any:
        with torch.no_grad():
            fake = g(z)
        loss = d(fake).mean() - d(real).mean() + 10 * penalty(d, real, fake, alpha)
        d.backward(loss)
        return loss

    @kit.step
    def generator_step(g: Any, d: Any, z: Any) -> Any:
        loss = -d(g(z)).mean()
        g.backward(loss)
        return loss

    for _epoch in range(3):
        for _ in range(2):
            d.zero_grad(set_to_none=True)
            loss = critic_step(g, d, torch.randn(8, 6), torch.randn(8, 4), torch.rand(8, 1))
            od.step()
            kit.note(loss)
        for p in d.parameters():
            p.requires_grad_(False)
        g.zero_grad()
        kit.note(generator_step(g, d, torch.randn(8, 4)))
        og.step()
        for p in d.parameters():
            p.requires_grad_(True)


@script()
def stylegan_r1_every_other_step_and_average(kit: Kit) -> None:
    class Mapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, z: Any) -> Any:
            z = z * torch.rsqrt(z.square().mean(dim=1, keepdim=True) + 1e-8)
            for layer in self.layers:
                z = F.leaky_relu(layer(z), 0.2)
            return z

    class Modulated(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width, 3, 3))
            self.style = nn.Linear(4, width)

        def forward(self, x: Any, w: Any) -> Any:
            b, c, height, width = x.shape
            weight = self.weight[None] * (self.style(w)[:, None, :, None, None] + 1)
            weight = weight * torch.rsqrt(weight.square().sum([2, 3, 4], keepdim=True) + 1e-8)
            x = x.reshape(1, b * c, height, width)
            x = F.conv2d(x, weight.reshape(b * c, c, 3, 3), padding=1, groups=b)
            return x.reshape(b, c, height, width)

    class Synthesis(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mapping = Mapping()
            self.const = nn.Parameter(torch.randn(1, 3, 4, 4))
            self.one, self.two = Modulated(3), Modulated(3)
            self.register_buffer("w_avg", torch.zeros(4))

        def forward(self, z: Any) -> Any:
            w = self.mapping(z)
            self.w_avg.copy_(w.detach().mean(dim=0).lerp(self.w_avg, 0.9))
            x = self.one(self.const.repeat(len(z), 1, 1, 1), w)
            return torch.tanh(self.two(F.leaky_relu(x, 0.2), w))

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = spectral_norm(nn.Conv2d(3, 4, 3, padding=1))
            self.head = nn.Linear(4 * 16, 1)

        def forward(self, x: Any) -> Any:
            return self.head(F.softplus(self.conv(x)).flatten(1)).squeeze(1)

    net = Synthesis()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    g, d = kit.model(net), kit.model(Judge())
    og = kit.optimizer(torch.optim.Adam(g.parameters(), 1e-3, (0.0, 0.99)))
    od = kit.optimizer(torch.optim.Adam(d.parameters(), 1e-3, (0.0, 0.99)))

    @kit.step
    def main(g: Any, d: Any, real: Any, z: Any) -> Any:
        loss = F.softplus(d(g(z).detach())).mean() + F.softplus(-d(real)).mean()
        d.backward(loss)
        return loss

    @kit.step
    def r1(d: Any, real: Any) -> Any:
        real = real.detach().requires_grad_()
        (grad,) = torch.autograd.grad(d(real).sum(), real, create_graph=True)
        loss = grad.square().sum([1, 2, 3]).mean() * 5
        d.backward(loss)
        return loss

    @kit.step
    def generate(g: Any, d: Any, z: Any) -> Any:
        loss = F.softplus(-d(g(z))).mean()
        g.backward(loss)
        return loss

    for number in range(3):
        real = torch.randn(4, 3, 4, 4)
        od.zero_grad()
        kit.note(main(g, d, real, torch.randn(4, 4)))
        if number % 2 == 0:
            kit.note(r1(d, real))
        od.step()
        og.zero_grad()
        kit.note(generate(g, d, torch.randn(4, 4)))
        og.step()
        with torch.no_grad():
            for kept, p in zip(ema.parameters(), net.parameters(), strict=True):
                kept.copy_(p.lerp(kept, 0.95))
            for kept, b in zip(ema.buffers(), net.buffers(), strict=True):
                kept.copy_(b)
    kit.note(sum(p.sum() for p in ema.parameters()).item())


@script()
def cyclegan_with_image_pool(kit: Kit) -> None:
    import random

    class Pool:
        def __init__(self, size: int) -> None:
            self.size, self.images = size, []  # type: ignore[var-annotated]

        def query(self, images: Any) -> Any:
            found = []
            for image in images:
                if len(self.images) < self.size:
                    self.images.append(image)
                    found.append(image)
                elif random.uniform(0, 1) > 0.5:
                    at = random.randint(0, self.size - 1)
                    found.append(self.images[at].clone())
                    self.images[at] = image
                else:
                    found.append(image)
            return torch.stack(found)

    def conv() -> nn.Module:
        return nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(),
            nn.Conv2d(4, 2, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def patch() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 2, 2), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 1))

    import itertools

    ab, ba = kit.model(conv()), kit.model(conv())
    da, db = kit.model(patch()), kit.model(patch())
    og = kit.optimizer(torch.optim.Adam(itertools.chain(ab.parameters(), ba.parameters()), 1e-3))
    od = kit.optimizer(torch.optim.Adam(itertools.chain(da.parameters(), db.parameters()), 1e-3))
    pool_a, pool_b = Pool(6), Pool(6)

    @kit.step
    def generators(ab: Any, ba: Any, da: Any, db: Any, a: Any, b: Any) -> Any:
        fake_b, fake_a = ab(a), ba(b)
        judged_b, judged_a = db(fake_b), da(fake_a)
        loss = F.mse_loss(judged_b, torch.ones_like(judged_b)) + F.mse_loss(
            judged_a, torch.ones_like(judged_a)
        )
        loss = loss + 10 * (F.l1_loss(ba(fake_b), a) + F.l1_loss(ab(fake_a), b))
        loss = loss + 5 * (F.l1_loss(ab(b), b) + F.l1_loss(ba(a), a))
        ab.backward(loss)
        return loss, fake_a.detach(), fake_b.detach()

    @kit.step
    def judges(da: Any, db: Any, a: Any, b: Any, fake_a: Any, fake_b: Any) -> Any:
        loss = 0
        for d, real, fake in ((da, a, fake_a), (db, b, fake_b)):
            good, bad = d(real), d(fake)
            loss = loss + 0.5 * ((good - 1) ** 2).mean() + 0.5 * (bad**2).mean()
        da.backward(loss)
        return loss

    for _ in range(3):
        a, b = torch.randn(4, 2, 4, 4), torch.randn(4, 2, 4, 4)
        for p in [*da.parameters(), *db.parameters()]:
            p.requires_grad = False
        og.zero_grad()
        loss, fake_a, fake_b = generators(ab, ba, da, db, a, b)
        og.step()
        for p in [*da.parameters(), *db.parameters()]:
            p.requires_grad = True
        od.zero_grad()
        kit.note(
            loss,
            judges(da, db, a, b, pool_a.query(fake_a.concat()), pool_b.query(fake_b.concat())),
        )
        od.step()


@script()
def hinge_gan_with_class_projection(kit: Kit) -> None:
    class ConditionalNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(width, affine=False)
            self.embed = nn.Embedding(3, 2 * width)
            nn.init.normal_(self.embed.weight.data[:, :width], 1, 0.02)
            self.embed.weight.data[:, width:].zero_()

        def forward(self, x: Any, y: Any) -> Any:
            gamma, beta = self.embed(y).chunk(2, 1)
            return gamma * self.norm(x) + beta

    class Maker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm = nn.Linear(4, 8), ConditionalNorm(8)
            self.two = nn.Linear(8, 6)

        def forward(self, z: Any, y: Any) -> Any:
            return self.two(F.relu(self.norm(self.one(z), y)))

    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = parametrizations.spectral_norm(nn.Linear(6, 8))
            self.two = parametrizations.spectral_norm(nn.Linear(8, 1))
            self.embed = parametrizations.spectral_norm(nn.Embedding(3, 8))

        def forward(self, x: Any, y: Any) -> Any:
            h = F.relu(self.one(x))
            return self.two(h) + (self.embed(y) * h).sum(1, keepdim=True)

    g, d = kit.model(Maker()), kit.model(Projection())
    og = kit.optimizer(torch.optim.Adam(g.parameters(), 1e-3))
    od = kit.optimizer(torch.optim.Adam(d.parameters(), 4e-3))

    @kit.step
    def judge(g: Any, d: Any, x: Any, y: Any, z: Any) -> Any:
        fake = g(z, y).detach()
        loss = F.relu(1 - d(x, y)).mean() + F.relu(1 + d(fake, y)).mean()
        d.backward(loss)
        return loss

    @kit.step
    def make(g: Any, d: Any, y: Any, z: Any) -> Any:
        d.requires_grad_(False)
        loss = -d(g(z, y), y).mean()
        g.backward(loss)
        d.requires_grad_(True)
        return loss

    for _ in range(3):
        y = torch.randint(0, 3, (8,))
        od.zero_grad()
        kit.note(judge(g, d, torch.randn(8, 6), y, torch.randn(8, 4)))
        od.step()
        og.zero_grad()
        kit.note(make(g, d, y, torch.randn(8, 4)))
        og.step()


@script()
def pix2pix_unet_with_feature_matching(kit: Kit) -> None:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = nn.Conv2d(1, 4, 4, 2, 1), nn.Conv2d(4, 8, 4, 2, 1)
            self.norm = nn.BatchNorm2d(8)
            self.up2, self.up1 = (
                nn.ConvTranspose2d(8, 4, 4, 2, 1),
                nn.ConvTranspose2d(8, 1, 4, 2, 1),
            )

        def forward(self, x: Any) -> Any:
            skip = F.leaky_relu(self.down1(x), 0.2)
            x = self.norm(self.down2(skip))
            x = self.up2(F.relu(x))
            return torch.tanh(self.up1(torch.cat([F.relu(x), skip], 1)))

    class Patch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 1, 1)]
            )

        def forward(self, x: Any, condition: Any) -> Any:
            x, features = torch.cat([x, condition], 1), []
            for block in self.blocks:
                x = F.leaky_relu(block(x), 0.2)
                features.append(x)
            return features

    g, d = kit.model(Unet()), kit.model(Patch())
    og = kit.optimizer(torch.optim.Adam(g.parameters(), 2e-3))
    od = kit.optimizer(torch.optim.Adam(d.parameters(), 2e-3))

    @kit.step
    def both(g: Any, d: Any, x: Any, y: Any) -> Any:
        """One step function for both models, as where losses come from one forward pass."""
        fake = g(x)
        real_features, fake_features = d(y, x), d(fake.detach(), x)
        d_loss = ((real_features[-1] - 1) ** 2).mean() + (fake_features[-1] ** 2).mean()
        d.backward(d_loss)
        judged = d(fake, x)
        matched = sum(
            F.l1_loss(a, b.detach()) for a, b in zip(judged[:-1], real_features[:-1], strict=True)
        )
        g_loss = ((judged[-1] - 1) ** 2).mean() + 10 * matched + 100 * F.l1_loss(fake, y)
        return d_loss, g_loss, g.backward(g_loss)

    for _ in range(3):
        og.zero_grad()
        od.zero_grad()
        d_loss, g_loss, _ = both(g, d, torch.randn(4, 1, 8, 8), torch.rand(4, 1, 8, 8))
        od.zero_grad()  # what the generator's loss left there
        og.step()
        kit.note(d_loss, g_loss)
