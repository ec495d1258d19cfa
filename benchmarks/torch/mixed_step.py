"""Time of one training step of a GPT that is split in several ways at once.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 4 benchmarks/torch/mixed_step.py --tensor 2 --pipeline 2

The model is plain PyTorch; ``--tensor``, ``--pipeline`` and ``--sharded`` are degrees, and what
they leave of the ranks are replicas. Blocks are split by ``tensor_parallelism(auto=True)``. The
batch is that of the whole job, the same for every way, so that the losses are, too. On GPUs weights
are bf16 with fp32 masters (``bf16``). AdamW; random tokens, the same in every step. FLOPs are those
of ``gpt.Size``. Times are medians of device events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from gpt import GPT, SIZES, device_milliseconds, loss_of, measured
from ranks import print_kernels

import smdistributed.modelparallel.torch as smp


def start(options: argparse.Namespace) -> None:
    """Starts the library with the degrees of the command line."""
    config: dict[str, Any] = {
        "ddp": True,
        "tensor_parallel_degree": options.tensor,
        "pipeline_parallel_degree": options.pipeline,
        "pipeline": "zero_bubble",
        "microbatches": options.microbatches,
        "bf16": torch.cuda.is_available(),
    }
    if options.sharded > 1:
        config["sharded_data_parallel_degree"] = options.sharded
    smp.init(config)


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """Returns a model on a device, and its optimizer."""
    size = SIZES[options.size]
    torch.manual_seed(1)
    with device, smp.tensor_parallelism(enabled=options.tensor > 1, auto=True):
        module = GPT(size, size.layers)
    for block in module.blocks if options.compile else ():
        block.compile()
    model = smp.DistributedModel(module)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
    return model, smp.DistributedOptimizer(optimizer)


def main() -> None:
    """Trains, and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6.7b")
    parser.add_argument("--tensor", type=int, default=1, help="tensor_parallel_degree")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline_parallel_degree")
    parser.add_argument("--sharded", type=int, default=1, help="sharded_data_parallel_degree")
    parser.add_argument("--batch", type=int, default=16, help="examples of the whole job")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of a pipeline's passes")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
    options = parser.parse_args()
    start(options)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", smp.local_rank())
    model, optimizer = build(options, device)

    @smp.step(cuda_graphs=options.graphs)
    def train(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(tokens), targets)
        model.backward(loss)
        return loss

    size = SIZES[options.size]
    draws = torch.Generator().manual_seed(1234)
    tokens = torch.randint(size.vocabulary, (options.batch, size.length + 1), generator=draws)
    own = tokens.chunk(smp.dp_size())[smp.dp_rank()].to(device)
    losses = []

    def step() -> None:
        losses.append(train(model, own[:, :-1], own[:, 1:]).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(options.warmup):
        step()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(device_milliseconds(step, options.steps))
    slowest = max(smp.allgather(ms, smp.WORLD))
    flops = size.flops_per_token * options.batch * size.length / smp.size()
    figures = measured(slowest, flops)
    ends = torch.stack([losses[0], losses[-1]]).tolist()
    everyones = smp.allgather(ends, smp.WORLD)
    if smp.rank() == 0:
        first, last = (statistics.mean(each) for each in zip(*everyones, strict=True))
        row = {"loss_first": round(first, 6), "loss_last": round(last, 6)}
        print(json.dumps({**vars(options), "ranks": smp.size(), **figures, **row}), flush=True)
    if options.profile:
        print_kernels(step)


if __name__ == "__main__":
    main()
