"""Autoencoders, codebooks and masks."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def vae_with_annealed_kl_and_namedtuple(kit: Kit) -> None:
    Output = namedtuple("Output", ["recon", "mu", "logvar"])

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
            self.mu, self.logvar = nn.Linear(12, 3), nn.Linear(12, 3)
            self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 8))

        def reparameterize(self, mu: Any, logvar: Any, eps: Any) -> Any:
            return mu + eps * torch.exp(0.5 * logvar)

        def forward(self, x: Any, eps: Any) -> Any:
            h = self.encoder(x)
            mu, logvar = self.mu(h), self.logvar(h)
            return Output(self.decoder(self.reparameterize(mu, logvar, eps)), mu, logvar)

    model = kit.model(Vae())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    beta = {"now": 0.0}

    @kit.step
    def train(model: Any, x: Any, eps: Any) -> Any:
        out = model(x, eps)
        bce = F.binary_cross_entropy_with_logits(out.recon, x, reduction="sum") / len(x)
        kld = -0.5 * torch.sum(1 + out.logvar - out.mu.pow(2) - out.logvar.exp()) / len(x)
        loss = bce + beta["now"] * kld
        model.backward(loss)
        return {"loss": loss, "bce": bce.detach(), "kld": kld.detach()}

    for number in range(3):
        beta["now"] = number / 2
        optimizer.zero_grad()
        out = train(model, torch.rand(8, 8), torch.randn(8, 3))
        optimizer.step()
        kit.note(out["loss"], out["bce"], out["kld"])


@script(draws=True)
def vae_that_draws_in_its_forward(kit: Kit) -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x: Any) -> Any:
            mu, logvar = self.encoder(x).chunk(2, -1)
            posterior = torch.distributions.Normal(mu, (0.5 * logvar).exp())
            prior = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
            z = posterior.rsample()
            likelihood = torch.distributions.Normal(self.decoder(z), 1.0)
            kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
            return (kl - likelihood.log_prob(x).sum(-1)).mean()

    model = kit.model(Vae())
    optimizer = kit.optimizer(torch.optim.Adamax(model.parameters(), lr=1e-2))

    @kit.step
    def train(model: Any, x: Any) -> Any:
        elbo = model(x)
        model.backward(elbo)
        return elbo

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6)))
        optimizer.step()


@script()
def vq_vae_with_straight_through_and_ema_codebook(kit: Kit) -> None:
    class Quantizer(nn.Module):
        def __init__(self, codes: int = 5, width: int = 4) -> None:
            super().__init__()
            self.register_buffer("embed", torch.randn(codes, width))
            self.register_buffer("cluster_size", torch.zeros(codes))
            self.register_buffer("embed_avg", self.embed.clone())

        def forward(self, z: Any) -> Any:
            distance = torch.cdist(z, self.embed)
            index = distance.argmin(1)
            onehot = F.one_hot(index, len(self.embed)).type(z.dtype)
            quantized = F.embedding(index, self.embed)
            if self.training:
                with torch.no_grad():
                    self.cluster_size.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                    self.embed_avg.mul_(0.9).add_(onehot.t() @ z, alpha=0.1)
                    n = self.cluster_size.sum()
                    size = (self.cluster_size + 1e-5) / (n + 5e-5) * n
                    self.embed.copy_(self.embed_avg / size.unsqueeze(1))
            commit = F.mse_loss(z, quantized.detach())
            quantized = z + (quantized - z).detach()
            perplexity = torch.exp(-(onehot.mean(0) * (onehot.mean(0) + 1e-10).log()).sum())
            return quantized, commit, perplexity

    class VqVae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
            self.quantizer = Quantizer()
            self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

        def forward(self, x: Any) -> Any:
            q, commit, perplexity = self.quantizer(self.encoder(x))
            return self.decoder(q), commit, perplexity

    model = kit.model(VqVae())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True))

    @kit.step
    def train(model: Any, x: Any) -> Any:
        recon, commit, perplexity = model(x)
        loss = F.mse_loss(recon, x) + 0.25 * commit
        model.backward(loss)
        return loss, perplexity

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(*train(model, torch.randn(8, 6)))
        optimizer.step()


@script()
def masked_autoencoder_with_shuffles(kit: Kit) -> None:
    class Mae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Linear(4, 8)
            self.pos = nn.Parameter(torch.randn(1, 6, 8) * 0.02)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.decoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Any, noise: Any) -> Any:
            n, length, _ = x.shape
            keep = length // 2
            h = self.patch(x) + self.pos
            shuffle = noise.argsort(1)
            restore = shuffle.argsort(1)
            index = shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, 8)
            h = self.encoder(h.gather(1, index))
            tokens = self.mask_token.repeat(n, length - keep, 1)
            h = torch.cat([h, tokens], 1)
            h = h.gather(1, restore.unsqueeze(-1).expand(-1, -1, 8)) + self.pos
            mask = torch.ones(n, length)
            mask[:, :keep] = 0
            mask = mask.gather(1, restore)
            loss = (self.head(self.decoder(h)) - x).pow(2).mean(-1)
            return (loss * mask).sum() / mask.sum()

    model = kit.model(Mae())
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = kit.optimizer(
        torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.95),
        )
    )

    @kit.step
    def train(model: Any, x: Any, noise: Any) -> Any:
        loss = model(x, noise)
        model.backward(loss)
        return loss

    for number in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * number / 3))
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6, 4), torch.rand(8, 6)))
        optimizer.step()
