"""Time of one training step of an unchanged model of Transformers on one long sequence.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/sequence_step.py --context 2 --length 65536

``--context`` is the number of ranks that share the sequence, and ``--sharded`` that of ranks that
share parameters, which may be the same ranks. Layers are computed again in the backward pass. On
GPUs weights are bf16 with fp32 masters; AdamW; random tokens, the same in every step. Times are
medians of device events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
import transformers
from gpt import device_milliseconds
from ranks import memory_gib
from transformers_step import MODELS

import smdistributed.modelparallel.torch as smp


def main() -> None:
    """Trains, and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama_1.3b")
    parser.add_argument("--length", type=int, default=16384, help="tokens of the sequence")
    parser.add_argument("--context", type=int, default=1, help="context_parallel_degree")
    parser.add_argument("--sharded", type=int, default=1, help="sharded_data_parallel_degree")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    config: dict[str, Any] = {"ddp": True, "bf16": is_cuda, "microbatches": 1}
    config["context_parallel_degree"] = options.context
    if options.sharded > 1:
        config["sharded_data_parallel_degree"] = options.sharded
    smp.init(config)
    device = torch.device("cuda", smp.local_rank()) if is_cuda else torch.device("cpu")
    kind, model_config, _, _ = MODELS[options.model]
    model_config.max_position_embeddings = options.length
    torch.manual_seed(1)
    with device:
        module = getattr(transformers, kind)(model_config)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = smp.DistributedModel(module.train())
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=is_cuda)
    )

    @smp.step
    def train(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        model.backward(loss)
        return loss

    draws = torch.Generator().manual_seed(1234)
    tokens = torch.randint(model_config.vocab_size, (1, options.length), generator=draws).to(device)
    losses = []

    def step() -> None:
        losses.append(train(model, tokens, tokens).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()

    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.warmup):
        step()
    ms = statistics.median(device_milliseconds(step, options.steps))
    slowest = max(smp.allgather(ms, smp.WORLD))
    memory = memory_gib()
    if smp.rank() == 0:
        row = {
            "ms": round(slowest, 1),
            "loss_first": round(losses[0].item(), 6),
            "loss_last": round(losses[-1].item(), 6),
            "memory_gib": memory,
        }
        print(json.dumps({**vars(options), "ranks": smp.size(), **row}), flush=True)


if __name__ == "__main__":
    main()
