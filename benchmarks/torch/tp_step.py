"""Time of one training step of a GPT that is split over tensor-parallel ranks.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/tp_step.py --size 6.7b --batch 8

Weights are bf16 on GPUs; AdamW; random tokens, the same in every step, so that the loss falls. The
batch is that of the whole job, of which every rank brings its share. FLOPs are 6 N + 12 L h s a
token, recomputation not counted. Times are medians of device events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp


@dataclass(frozen=True)
class Size:
    """Dimensions of a GPT."""

    layers: int
    hidden: int
    head_size: int = 128
    vocabulary: int = 50304
    length: int = 2048

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward pass; N leaves out the two tables that are looked up."""
        h = self.hidden
        weights = self.layers * (12 * h * h + 13 * h) + 2 * h + self.vocabulary * h
        return 6 * weights + 12 * self.layers * h * self.length


SIZES = {
    "tiny": Size(4, 64, 16, 512, 64),
    "1.3b": Size(24, 2048),
    "2.7b": Size(32, 2560),
    "6.7b": Size(32, 4096),
}


def build(size: Size, dtype: torch.dtype) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    with torch.device(device), smp.model_creation(tensor_parallelism=True, dtype=dtype):
        return smp.nn.DistributedTransformerLMHead(
            num_layers=size.layers,
            num_attention_heads=size.hidden // size.head_size,
            attention_head_size=size.head_size,
            hidden_size=size.hidden,
            intermediate_size=4 * size.hidden,
            vocab_size=size.vocabulary,
            num_positions=size.length,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            activation="gelu_new",
            causal_mask_size=size.length,
            use_normal_initialization=True,
            pre_layernorm=True,
            post_layernorm=False,
            tie_lm_head=False,
        )


@smp.step
def train(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model((tokens, None, None, None, None))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    model.backward(loss)
    return loss


def share_of_batch(size: Size, batch: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1234)
    tokens = torch.randint(size.vocabulary, (batch, size.length + 1), generator=draws)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = tokens.chunk(smp.dp_size())[smp.dp_rank()].to(device)
    return [own[:, :-1].contiguous(), own[:, 1:].contiguous()]


def milliseconds(step: Any, count: int) -> list[float]:
    if not torch.cuda.is_available():
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(events)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6.7b")
    parser.add_argument("--batch", type=int, default=8, help="examples of the whole job")
    parser.add_argument("--degree", type=int, help="tensor_parallel_degree; default: all ranks")
    parser.add_argument("--optimize", choices=("speed", "memory"), default="speed")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    smp.init(
        {
            "tensor_parallel_degree": options.degree or int(os.environ.get("WORLD_SIZE", "1")),
            "ddp": True,
            "optimize": options.optimize,
            "microbatches": options.microbatches,
        }
    )
    size = SIZES[options.size]
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    start = time.perf_counter()
    model = smp.DistributedModel(build(size, dtype))
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.1, fused=torch.cuda.is_available()
        )
    )
    inputs = share_of_batch(size, options.batch)
    built_seconds = time.perf_counter() - start
    losses = []

    def step() -> None:
        losses.append(train(model, *inputs).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(options.warmup):
        step()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(milliseconds(step, options.steps))
    slowest = max(smp.allgather(ms, smp.WORLD))
    flops = size.flops_per_token * options.batch * size.length / smp.size()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if smp.rank() == 0:
        print(
            json.dumps(
                {
                    **vars(options),
                    "ranks": smp.size(),
                    "ms": round(slowest, 1),
                    "tflops_per_rank": round(flops / slowest / 1e9, 2),
                    "gib": round(peak / 2**30, 1),
                    "loss_first": round(losses[0].item(), 6),
                    "loss_last": round(losses[-1].item(), 6),
                    "built_seconds": round(built_seconds, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
