"""Blocks whose heads come together with what every rank has whole, or whose norms span all heads.

They are trained in slices and by one process, see ``one_module_blocks``.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from one_module_blocks import (
    VOCAB,
    RootMeanSquare,
    check_captured,
    difference,
    in_double_precision,
    outcomes_of,
    trained,
)
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

WIDTH, HEADS, INNER = 32, 8, 24

KINDS = (
    *("slopes", "computed slopes", "table", "given", "folded", "temperature", "gate", "sinks"),
    *("one key", "few keys", "one map", "wide norm", "wide mean", "latent", "inner norm"),
)
NORMS = "pre", "post"
PLACES = "one module", "apart"
SPELLINGS = "softmax", "kernel"
SIZES = "attributes", "numbers"
RATES = "none", "all"
MASKS = "causal", "given", "none"

Member = tuple[str, str, str, str, str, str, str]


class Attention(nn.Module):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.kind, _, _, self.spelling, self.sizes, rates, mask = member
        self.rate, self.is_causal = 0.2 if rates == "all" else 0.0, mask == "causal"
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        kept = {"one key": 1, "one map": 1, "few keys": 2}.get(self.kind, HEADS) * self.head_dim
        self.repeats = WIDTH // kept
        if self.kind == "one map":
            self.split_size, self.all = WIDTH, nn.Linear(WIDTH, WIDTH + 2 * kept)
        elif self.kind == "latent":
            self.down, self.small_norm = nn.Linear(WIDTH, 8), nn.LayerNorm(8)
            self.q_proj, self.kv_proj = nn.Linear(8, WIDTH), nn.Linear(8, 2 * WIDTH)
        else:
            self.q_proj = nn.Linear(WIDTH, WIDTH)
            self.k_proj, self.v_proj = nn.Linear(WIDTH, kept), nn.Linear(WIDTH, kept)
        self.out = nn.Linear(WIDTH, WIDTH)
        if self.kind == "wide norm":
            self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        elif self.kind == "wide mean":
            self.q_norm, self.k_norm = RootMeanSquare(WIDTH), RootMeanSquare(WIDTH)
        elif self.kind == "slopes":
            self.register_buffer("slopes", -torch.rand(HEADS, 1, 1))
        elif self.kind == "temperature":
            self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        elif self.kind == "gate":
            self.gate = nn.Parameter(torch.randn(HEADS))
        elif self.kind == "sinks":
            self.sinks = nn.Parameter(torch.randn(HEADS))
        elif self.kind == "table":
            self.table = nn.Embedding(5, HEADS)

    def heads(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if self.sizes == "numbers" and number > 2:
            return x.view(x.shape[0], x.shape[1], 8, 4).transpose(1, 2)
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.kind == "one map":
            sizes = self.split_size, self.head_dim, self.head_dim
            query, key, value = self.all(x).split(sizes, -1)
            query, key, value = self.heads(query, HEADS), self.heads(key, 1), self.heads(value, 1)
        elif self.kind == "latent":
            small = self.small_norm(self.down(x))
            both = self.kv_proj(small).unflatten(-1, (-1, 2, self.head_dim))
            key, value = both.permute(3, 0, 2, 1, 4)
            query = self.heads(self.q_proj(small), HEADS)
        else:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            if self.kind.startswith("wide"):
                query, key = self.q_norm(query), self.k_norm(key)
            number = HEADS // self.repeats
            query = self.heads(query, HEADS)
            key, value = self.heads(key, number), self.heads(value, number)
        if self.repeats > 1:
            key, value = (each.repeat_interleave(self.repeats, 1) for each in (key, value))
        if self.kind == "temperature":
            query = query * self.temperature
        made = self.attended(query, key, value, self.added(x, mask, bias))
        if self.kind == "gate":
            made = torch.einsum("bhtd,h->bhtd", made, self.gate.sigmoid())
        made = made.transpose(1, 2)
        wide = (WIDTH,) if self.sizes == "numbers" else (-1,)
        return self.out(made.reshape(*x.shape[:2], *wide))

    def added(
        self, x: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns what is added to the scores."""
        length = x.shape[1]
        places = torch.arange(length, device=x.device)
        distances = (places[:, None] - places).abs()
        found = None
        if self.kind == "slopes":
            found = self.slopes * distances
        elif self.kind == "computed slopes":
            found = -(2.0 ** -torch.arange(HEADS, device=x.device))[:, None, None] * distances
        elif self.kind == "table":
            found = self.table(distances.clamp(max=4)).permute(2, 0, 1)[None]
        elif self.kind == "given":
            found = bias
        hidden = None
        if self.is_causal:
            hidden = places[:, None] < places
        if mask is not None:
            hidden = ~mask if hidden is None else hidden | ~mask
        if hidden is None:
            return found
        floor = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
        floor = floor.masked_fill(hidden, -1e9)
        if found is None:
            return floor
        return found + floor

    def attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        added: torch.Tensor | None,
    ) -> torch.Tensor:
        rate = self.rate if self.training else 0.0
        if self.kind not in ("sinks", "folded") and self.spelling == "kernel":
            return F.scaled_dot_product_attention(query, key, value, added, rate)
        scale = query.shape[-1] ** -0.5
        if self.kind == "folded":
            places = torch.arange(query.shape[2], device=query.device, dtype=query.dtype)
            slopes = -(2.0 ** -torch.arange(HEADS, device=query.device))[:, None, None]
            together = (slopes * places).repeat(query.shape[0], 1, 1)
            made = torch.baddbmm(
                together, query.flatten(0, 1), key.flatten(0, 1).mT, beta=0.5, alpha=scale
            )
            scores = made.view(query.shape[0], -1, *made.shape[1:])
        else:
            scores = query @ key.mT * scale
        if added is not None:
            scores = scores + added
        if self.kind == "sinks":
            sinks = self.sinks[None, :, None, None].expand(
                *scores.shape[:1], -1, scores.shape[2], 1
            )
            scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
        return F.dropout(scores, rate, self.training) @ value


class Inner(nn.Module):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            *(nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)),
            nn.Linear(INNER, WIDTH),
        )
        has_norm = member[0] == "inner norm"
        self.norm = (nn.LayerNorm if member[1] == "pre" else RootMeanSquare)(INNER)
        self.norm = self.norm if has_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.norms = member[1]
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.inner = Attention(member), Inner(member)
        self.dropout = nn.Dropout(0.1 if member[5] == "all" else 0.0)

    def forward(self, x: torch.Tensor, *given: torch.Tensor | None) -> torch.Tensor:
        if self.norms == "post":
            x = self.first(x + self.dropout(self.attention(x, *given)))
            return self.second(x + self.dropout(self.inner(x)))
        x = x + self.dropout(self.attention(self.first(x), *given))
        return x + self.dropout(self.inner(self.second(x)))


class Flat(Attention):
    """A block with its maps in itself."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self.norms = member[1]
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner = Inner(member)
        self.dropout = nn.Dropout(0.1 if member[5] == "all" else 0.0)

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        if self.norms == "post":
            x = self.first(x + self.dropout(super().forward(x, *given)))
            return self.second(x + self.dropout(self.inner(x)))
        x = x + self.dropout(super().forward(self.first(x), *given))
        return x + self.dropout(self.inner(self.second(x)))


class Model(nn.Module):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        made = Flat if member[2] == "one module" else Block
        self.blocks = nn.ModuleList(made(member) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.has_mask, self.has_bias = member[-1] == "given", member[0] == "given"
        if self.has_bias:
            self.bias = nn.Embedding(5, HEADS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = bias = None
        if self.has_mask:
            mask = (ids > 2)[:, None, None, :] | (places == 0)
        if self.has_bias:
            distances = (places[:, None] - places).abs().clamp(max=4)
            bias = self.bias(distances).permute(2, 0, 1)[None]
        for block in self.blocks:
            x = block(x, mask, bias)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def members() -> Iterator[Member]:
    """Yields all."""
    yield from itertools.product(KINDS, NORMS, PLACES, SPELLINGS, SIZES, RATES, MASKS)


def sample(number: int, seed: int) -> list[Member]:
    """Returns some of each kind, of all else about as much."""
    draws = random.Random(seed)
    each = -(-number // len(KINDS))
    return [
        member
        for kind in KINDS
        for member in draws.sample([m for m in members() if m[0] == kind], each)
    ][:number]


def outcomes(chosen: list[Member], size: int, is_split: bool) -> list[dict[str, Any]]:
    """Returns what becomes of each, or why it is refused."""
    return outcomes_of(Model, chosen, size, is_split=is_split)


@in_double_precision()
def checkpointed(member: Member) -> None:
    """Blocks that are computed again meet and sum again, and draw what they drew."""

    def prepare(module: Any) -> None:
        smp.set_activation_checkpointing(module.blocks)

    make = functools.partial(Model, member)
    want = trained(make, 2, is_split=True)
    assert not difference(trained(make, 2, is_split=True, prepare=prepare), want)


@in_double_precision()
def captured(member: Member) -> None:
    """Passes that are captured give the numbers of those that are not."""
    check_captured(functools.partial(Model, (*member[:5], "none", member[6])))


@in_double_precision()
def compiled(member: Member) -> None:
    """Blocks that are compiled in place give the same, though groups in them run as written."""
    make = functools.partial(Model, (*member[:5], "none", member[6]))
    want = trained(make, 2, is_split=True)

    def prepare(module: Any) -> None:
        for block in module.blocks:
            block.compile(backend=lambda graph, inputs: graph.forward)

    torch.compiler.reset()
    assert not difference(trained(make, 2, is_split=True, prepare=prepare), want)
