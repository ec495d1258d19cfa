"""The GPT that the benchmarks train, plain PyTorch, and the clock that times its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Dimensions of a GPT."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50304
    length: int = 2048

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward pass: 6 N + 12 L h s, N without the tables that are looked up."""
        h = self.hidden
        weights = self.layers * (12 * h * h + 13 * h) + 2 * h + self.vocabulary * h
        return 6 * weights + 12 * self.layers * h * self.length


SIZES = {
    "tiny": Size(8, 64, 4, 512, 64),
    "124m": Size(12, 768, 12, length=1024),
    "1.3b": Size(24, 2048, 16),
    "2.7b": Size(32, 2560, 20),
    "6.7b": Size(32, 4096, 32),
}


class Block(nn.Module):
    """A decoder block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.attend = nn.Linear(size.hidden, 3 * size.hidden)
        self.project = nn.Linear(size.hidden, size.hidden)
        self.widen = nn.Linear(size.hidden, 4 * size.hidden)
        self.narrow = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, length, hidden] to the same."""
        parts = self.attend(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.second(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT, or the part of it that one stage of a chain has."""

    def __init__(self, size: Size, layers: int, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden) if first else None
        self.positions = nn.Embedding(size.length, size.hidden) if first else None
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.LayerNorm(size.hidden) if last else None
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens, or hidden states, to hidden states or logits."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def device_milliseconds(step: Callable[[], Any], count: int) -> list[float]:
    """Times steps that follow each other without a pause: by the device, on a CPU by the host."""
    if not torch.cuda.is_available():
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]


def peak_gib() -> float:
    """Returns the most that tensors took of this process's GPU; 0 without one."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def measured(milliseconds: float, flops: float) -> dict[str, float]:
    """Returns a step's time, FLOPs a second and memory, as benchmarks print them.

    ``gib`` is the peak of what tensors took, ``outside_gib`` what the GPU holds besides what
    PyTorch has reserved for them: its context, buffers of NCCL, memory that other GPUs read.

    Args:
        milliseconds: of a step.
        flops: that a rank computes in it.
    """
    outside = 0
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
    return {
        "ms": round(milliseconds, 1),
        "tflops_per_rank": round(flops / milliseconds / 1e9, 2),
        "gib": round(peak_gib(), 1),
        "outside_gib": round(outside / 2**30, 1),
    }
