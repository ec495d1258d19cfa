"""Time of one training step of a model of Transformers that is split in several ways at once.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 4 benchmarks/torch/mixed_step.py --tensor 2 --pipeline 2

``--tensor``, ``--experts``, ``--pipeline`` and ``--sharded`` are degrees, and what they leave of
the ranks are replicas. The model is as it is; blocks are split by
``tensor_parallelism(auto=True)``. The batch is that of the whole job, the same for every way, so
that the losses are, too. On GPUs weights are bf16 with fp32 masters (``bf16``). AdamW; random
tokens, the same in every step. FLOPs are 6 N + 12 L h s a token, where N are the parameters without
the embedding, and of experts those that a token goes to. Times are medians of device events, the
slowest rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from typing import Any

import torch
import transformers
from gpt import device_milliseconds, measured
from ranks import memory_gib, print_kernels
from transformers_step import MODELS

import smdistributed.modelparallel.torch as smp


def start(options: argparse.Namespace) -> torch.device:
    """Starts the library with the degrees of the command line; returns the device."""
    config: dict[str, Any] = {
        "ddp": True,
        "tensor_parallel_degree": max(options.tensor, options.experts),
        "expert_parallel_degree": options.experts,
        "pipeline_parallel_degree": options.pipeline,
        "pipeline": "zero_bubble",
        "microbatches": options.microbatches,
        "bf16": torch.cuda.is_available(),
    }
    if options.sharded > 1:
        config["sharded_data_parallel_degree"] = options.sharded
    smp.init(config)
    is_cuda = torch.cuda.is_available()
    return torch.device("cuda", smp.local_rank()) if is_cuda else torch.device("cpu")


def build(options: argparse.Namespace, device: torch.device) -> Any:
    """Returns the user's model."""
    kind, config, blocks, _ = MODELS[options.model]
    torch.manual_seed(1)
    split: Any = contextlib.nullcontext()
    if options.tensor > 1:
        split = smp.tensor_parallelism(auto=True)
    with device, split:
        module = getattr(transformers, kind)(config)
    for block in module.get_submodule(blocks) if options.compile else ():
        block.compile()
    return module


def flops_per_token(model: str) -> float:
    """Returns what a training step computes for a token."""
    kind, config, _, length = MODELS[model]
    with torch.device("meta"):
        module = getattr(transformers, kind)(config)
    parameters = sum(each.numel() for each in module.parameters())
    experts = sum(each.numel() for name, each in module.named_parameters() if ".experts." in name)
    if experts:
        parameters -= round(experts * (1 - config.num_experts_per_tok / config.num_experts))
    embedding = module.get_input_embeddings().weight.numel()
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return float(6 * (parameters - embedding) + attention)


def main() -> None:
    """Trains, and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama_7b")
    parser.add_argument("--tensor", type=int, default=1, help="tensor_parallel_degree")
    parser.add_argument("--experts", type=int, default=1, help="expert_parallel_degree")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline_parallel_degree")
    parser.add_argument("--sharded", type=int, default=1, help="sharded_data_parallel_degree")
    parser.add_argument("--batch", type=int, default=16, help="examples of the whole job")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs of the passes")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
    options = parser.parse_args()
    device = start(options)
    model = smp.DistributedModel(build(options, device))
    fused = device.type == "cuda"
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
    )

    @smp.step(cuda_graphs=False if options.eager else "auto")
    def train(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        model.backward(loss)
        return loss

    _, config, _, length = MODELS[options.model]
    draws = torch.Generator().manual_seed(1234)
    tokens = torch.randint(config.vocab_size, (options.batch, length), generator=draws)
    own = tokens.chunk(smp.dp_size())[smp.dp_rank()].to(device)
    losses = []

    def step() -> None:
        losses.append(train(model, own).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        # Before the first step: the memory of graphs is taken once, when they are captured.
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.warmup):
        step()
    ms = statistics.median(device_milliseconds(step, options.steps))
    slowest = max(smp.allgather(ms, smp.WORLD))
    flops = flops_per_token(options.model) * options.batch * length / smp.size()
    figures = measured(slowest, flops)
    memory = memory_gib()
    everyones = smp.allgather(torch.stack([losses[0], losses[-1]]).tolist(), smp.WORLD)
    if smp.rank() == 0:
        first, last = (statistics.mean(each) for each in zip(*everyones, strict=True))
        row = {
            "loss_first": round(first, 6),
            "loss_last": round(last, 6),
            "memory_gib": memory,
        }
        print(json.dumps({**vars(options), "ranks": smp.size(), **figures, **row}), flush=True)
    if options.profile:
        print_kernels(step)


if __name__ == "__main__":
    main()
