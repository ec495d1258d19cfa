"""Transformers written by hand, scans and convolutions along a sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script


@script()
def nanogpt_with_tied_head_and_configured_optimizer(kit: Kit) -> None:
    class Attention(nn.Module):
        def __init__(self, width: int, heads: int, block: int) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.heads = heads
            self.register_buffer(
                "bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block)
            )

        def forward(self, x: Any) -> Any:
            b, t, c = x.size()
            q, k, v = self.c_attn(x).split(c, dim=2)
            q, k, v = (e.view(b, t, self.heads, c // self.heads).transpose(1, 2) for e in (q, k, v))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
            return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(8), Attention(8, 2, 6), nn.LayerNorm(8)
            self.mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(32, 8)})

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(11, 8),
                    "wpe": nn.Embedding(6, 8),
                    "h": nn.ModuleList(Block() for _ in range(3)),
                    "ln_f": nn.LayerNorm(8),
                }
            )
            self.lm_head = nn.Linear(8, 11, bias=False)
            self.transformer.wte.weight = self.lm_head.weight
            self.apply(self._init)
            for name, p in self.named_parameters():
                if name.endswith("c_proj.weight"):
                    torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(6))

        def _init(self, module: nn.Module) -> None:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

        def configure_optimizers(self) -> Any:
            named = {n: p for n, p in self.named_parameters() if p.requires_grad}
            groups = [
                {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

        def forward(self, idx: Any, targets: Any = None) -> Any:
            pos = torch.arange(0, idx.size(1), dtype=torch.long)
            x = self.transformer.wte(idx) + self.transformer.wpe(pos)
            for block in self.transformer.h:
                x = block(x)
            x = self.transformer.ln_f(x)
            if targets is None:
                return self.lm_head(x[:, [-1], :]), None
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-1)

    net = Gpt()
    model = kit.model(net)
    optimizer = kit.optimizer(net.configure_optimizers())

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        _, loss = model(x, y)
        model.backward(loss)
        return loss

    @kit.step
    def following(model: Any, x: Any) -> Any:
        return model(x)[0]

    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        kit.note(train(model, torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 6))))
        optimizer.step()
    model.eval()
    idx = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(3):
            logits = following(model, idx).concat()[:, -1, :]
            idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
    kit.note(idx.double())


@script()
def rotary_grouped_query_blocks_with_rms_norm(kit: Kit) -> None:
    def rotate(x: Any, freqs: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3)

    class RmsNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wk, self.wv = (nn.Linear(8, n, bias=False) for n in (8, 4, 4))
            self.wo = nn.Linear(8, 8, bias=False)
            self.w1, self.w2, self.w3 = (
                nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False),
                nn.Linear(8, 12, bias=False),
            )  # fmt: skip
            self.one, self.two = RmsNorm(8), RmsNorm(8)

        def forward(self, x: Any, freqs: Any, mask: Any) -> Any:
            b, t, _ = x.shape
            h = self.one(x)
            q = rotate(self.wq(h).view(b, t, 2, 4), freqs)
            k = rotate(self.wk(h).view(b, t, 1, 4), freqs).repeat_interleave(2, dim=2)
            v = self.wv(h).view(b, t, 1, 4).expand(b, t, 2, 4)
            scores = torch.einsum("bthd,bshd->bhts", q, k) / 2 + mask
            out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(b, t, 8)
            x = x + self.wo(out)
            h = self.two(x)
            return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.layers = nn.ModuleList(Block() for _ in range(2))
            self.norm, self.output = RmsNorm(8), nn.Linear(8, 9, bias=False)
            angles = torch.outer(torch.arange(6.0), 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))
            self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            freqs = self.freqs_cis[: ids.shape[1]]
            mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
            for layer in self.layers:
                x = layer(x, freqs, mask)
            return self.output(self.norm(x))

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, ids: Any) -> Any:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        z = torch.logsumexp(logits, -1).square().mean()
        model.backward(loss + 1e-4 * z)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randint(0, 9, (4, 6))))
        optimizer.step()


@script()
def temporal_convolutions_with_weight_norm(kit: Kit) -> None:
    class Chomp(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def forward(self, x: Any) -> Any:
            return x[:, :, : -self.size].contiguous()

    class Block(nn.Module):
        def __init__(self, n_in: int, n_out: int, dilation: int) -> None:
            super().__init__()
            pad = 2 * dilation
            norm = nn.utils.parametrizations.weight_norm
            self.conv1 = norm(nn.Conv1d(n_in, n_out, 3, padding=pad, dilation=dilation))
            self.conv2 = norm(nn.Conv1d(n_out, n_out, 3, padding=pad, dilation=dilation))
            self.net = nn.Sequential(
                self.conv1, Chomp(pad), nn.ReLU(), self.conv2, Chomp(pad), nn.ReLU()
            )
            self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None

        def forward(self, x: Any) -> Any:
            res = x if self.downsample is None else self.downsample(x)
            return F.relu(self.net(x) + res)

    class Tcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(*(Block(2 if i == 0 else 4, 4, 2**i) for i in range(3)))
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return self.linear(self.network(x)[:, :, -1])

    model = kit.model(Tcn())
    optimizer = kit.optimizer(torch.optim.Adam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        loss = F.huber_loss(model(x), y)
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(4, 2, 10), torch.randn(4, 1)))
        optimizer.step()


@script()
def selective_state_space_scan(kit: Kit) -> None:
    class Ssm(nn.Module):
        def __init__(self, width: int, state: int) -> None:
            super().__init__()
            self.a_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(width, 1)))
            self.d = nn.Parameter(torch.ones(width))
            self.in_proj, self.out_proj = nn.Linear(width, 2 * width), nn.Linear(width, width)
            self.x_proj = nn.Linear(width, 1 + 2 * state)
            self.dt_proj = nn.Linear(1, width)
            self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
            self.state = state

        def forward(self, x: Any) -> Any:
            x, z = self.in_proj(x).chunk(2, -1)
            x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            dt, b, c = self.x_proj(x).split([1, self.state, self.state], -1)
            dt = F.softplus(self.dt_proj(dt))
            decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.a_log))
            inp = dt.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
            h, ys = x.new_zeros(*x.shape[::2], self.state), []
            for t in range(x.shape[1]):
                h = decay[:, t] * h + inp[:, t]
                ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
            return self.out_proj((torch.stack(ys, 1) + x * self.d) * F.silu(z))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.LayerNorm(4), Ssm(4, 3)]) for _ in range(2)
            )
            self.head = nn.Linear(4, 9)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            for norm, mixer in self.layers:
                x = x + mixer(norm(x))
            return self.head(x)

    model = kit.model(Net())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, ids: Any) -> Any:
        loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, torch.randint(0, 9, (4, 6))))
        optimizer.step()


@script()
def curriculum_of_growing_lengths(kit: Kit) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            n = ids.shape[1]
            pe = torch.zeros(n, 8)
            pos = torch.arange(n).unsqueeze(1)
            div = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
            pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
            x = x + pe
            mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
            out, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
            return self.head(self.norm(x + out))

    model = kit.model(Encoder())
    optimizer = kit.optimizer(torch.optim.RAdam(model.parameters(), 1e-2))

    @kit.step
    def train(model: Any, ids: Any) -> Any:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        model.backward(loss)
        return loss

    length, threshold = 3, 10.0
    for _ in range(4):
        optimizer.zero_grad()
        loss = train(model, torch.randint(0, 9, (4, length + 1)))
        optimizer.step()
        if loss.reduce_mean().item() < threshold:
            length += 1
        kit.note(loss, length)


@script()
def early_exit_by_confidence_in_evaluation(kit: Kit) -> None:
    class EarlyExit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
            self.exits = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Any) -> Any:
            outs = []
            for block, exit_ in zip(self.blocks, self.exits, strict=True):
                x = x + block(x)
                out = exit_(x)
                if not self.training and out.softmax(-1).max(-1).values.min() > 0.34:
                    return out
                outs.append(out)
            return outs if self.training else outs[-1]

    model = kit.model(EarlyExit())
    optimizer = kit.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    @kit.step
    def train(model: Any, x: Any, y: Any) -> Any:
        outs = model(x)
        loss = sum((i + 1) / 6 * F.cross_entropy(o, y) for i, o in enumerate(outs))
        model.backward(loss)
        return loss

    @kit.step
    def evaluate(model: Any, x: Any) -> Any:
        return model(x)

    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(8, 6), torch.randint(0, 3, (8,))))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            kit.note(evaluate(model, torch.randn(4, 6)).concat())
