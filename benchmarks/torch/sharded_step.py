"""Time of one training step of a GPT whose state is sharded over data-parallel ranks.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/sharded_step.py --size 6.7b --batch 4

fp32 masters and AdamW state in shards, bf16 weights while a unit computes (``bf16``). The batch is
a rank's. Every step sees the same random tokens, so that the loss falls. FLOPs are those of
``gpt.Size``; recomputation is not counted. Times are medians of the device, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
from gpt import GPT, SIZES, device_milliseconds, loss_of, measured
from kernels import kernel_milliseconds
from ranks import memory_gib

import smdistributed.modelparallel.torch as smp


@smp.step
def train(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(tokens), targets)
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6.7b")
    parser.add_argument("--batch", type=int, default=4, help="examples of a rank")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--live", type=int, default=1_000_000_000, help="sdp_max_live_parameters")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint each block")
    parser.add_argument("--offload", action="store_true", help="and keep what it keeps on the host")
    parser.add_argument("--clip", type=float, default=1.0, help="sdp_gradient_clipping")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": int(os.environ["WORLD_SIZE"]),
            "sdp_max_live_parameters": options.live,
            "sdp_gradient_clipping": options.clip,
            "bf16": True,
            "delayed_parameter_initialization": True,
            "offload_activations": options.offload,
            "microbatches": options.microbatches,
        }
    )
    size = SIZES[options.size]
    device = torch.device("cuda", smp.local_rank()) if is_cuda else torch.device("cpu")
    start = time.perf_counter()
    torch.manual_seed(1)
    with device, smp.delay_param_initialization():  # drawn on the device, not on the host
        module = GPT(size, size.layers)
    if options.compile:
        for block in module.blocks:
            block.compile()
    model = smp.DistributedModel(module)
    if options.checkpoint or options.offload:
        for block in module.blocks:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=is_cuda)
    )
    draws = torch.Generator().manual_seed(1234 + smp.dp_rank())
    shape = (options.batch * options.microbatches, size.length + 1)
    tokens = torch.randint(size.vocabulary, shape, generator=draws).to(device)
    losses = []

    def step() -> None:
        losses.append(train(model, tokens[:, :-1], tokens[:, 1:]).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    first_seconds = time.perf_counter() - start
    for _ in range(options.warmup - 1):
        step()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(device_milliseconds(step, options.steps))
    slowest = max(smp.allgather(ms, smp.WORLD))
    flops = size.flops_per_token * tokens.shape[0] * size.length
    step_figures = measured(slowest, flops)
    memory = memory_gib()
    profiled = kernel_milliseconds(step) if options.profile else None
    if smp.rank() == 0:
        row = {
            **vars(options),
            "ranks": smp.size(),
            **step_figures,
            "loss_first": round(losses[0].item(), 6),
            "loss_last": round(losses[-1].item(), 6),
            "first_seconds": round(first_seconds, 1),
            "memory_gib": memory,
        }
        print(json.dumps(row), flush=True)
        if profiled:
            print(json.dumps(profiled), flush=True)


if __name__ == "__main__":
    main()
