"""Time of one training step of a GPT that is split over tensor-parallel ranks.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/tp_step.py --size 6.7b --batch 8

Weights are bf16 on GPUs; AdamW; random tokens, the same in every step, so that the loss falls. The
batch is that of the whole job, of which every rank brings its share. FLOPs are 6 N + 12 L h s a
token, recomputation not counted. Times are medians of device events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
from gpt import SIZES, Size, device_milliseconds, loss_of, measured
from kernels import kernel_milliseconds

import smdistributed.modelparallel.torch as smp


def build(size: Size, dtype: torch.dtype) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    with torch.device(device), smp.model_creation(tensor_parallelism=True, dtype=dtype):
        return smp.nn.DistributedTransformerLMHead(
            num_layers=size.layers,
            num_attention_heads=size.heads,
            attention_head_size=size.hidden // size.heads,
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
            fused_bias_gelu=True,
        )


def train(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model((tokens, None, None, None, None))
    loss = loss_of(logits, targets)
    model.backward(loss)
    return loss


def share_of_batch(size: Size, batch: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1234)
    tokens = torch.randint(size.vocabulary, (batch, size.length + 1), generator=draws)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = tokens.chunk(smp.dp_size())[smp.dp_rank()].to(device)
    return [own[:, :-1].contiguous(), own[:, 1:].contiguous()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6.7b")
    parser.add_argument("--batch", type=int, default=8, help="examples of the whole job")
    parser.add_argument("--degree", type=int, help="tensor_parallel_degree; default: all ranks")
    parser.add_argument("--optimize", choices=("speed", "memory"), default="speed")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs of the passes")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
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
    train_step = smp.step(train, cuda_graphs=False) if options.eager else smp.step(train)

    def step() -> None:
        losses.append(train_step(model, *inputs).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()

    if torch.cuda.is_available():
        # Before the first step: the memory of graphs is taken once, when they are captured.
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.warmup):
        step()
    ms = statistics.median(device_milliseconds(step, options.steps))
    slowest = max(smp.allgather(ms, smp.WORLD))
    flops = size.flops_per_token * options.batch * size.length / smp.size()
    step_figures = measured(slowest, flops)
    profiled = kernel_milliseconds(step) if options.profile else None
    if smp.rank() == 0:
        print(
            json.dumps(
                {
                    **vars(options),
                    "ranks": smp.size(),
                    **step_figures,
                    "loss_first": round(losses[0].item(), 6),
                    "loss_last": round(losses[-1].item(), 6),
                    "built_seconds": round(built_seconds, 1),
                }
            ),
            flush=True,
        )

        if profiled:
            print(json.dumps(profiled), flush=True)


if __name__ == "__main__":
    main()
