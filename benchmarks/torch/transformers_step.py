"""Time of one training step of an unchanged model of Transformers over the ranks of a pipeline.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/transformers_step.py --model gpt2_xl one smp

``one`` is the same model on one GPU, alone: its time over the number of GPUs is what they need
without a bubble, and ``ideal_1f1b_ms`` with that of 1F1B. ``smp`` is this library; what stands
behind a colon changes it: ``compile`` (each block by ``torch.compile``), ``uncached`` (the model's
``use_cache=False``), ``float8`` (products in blocks in eight bits, by torchao), ``static``
(``smp.step(static=True)``), ``eager``
(``smp.step(cuda_graphs=False)``), ``loss`` (``smp.step(compile=True)``). With ``--replicas 2`` two
such pipelines train a batch each, and ``ddp`` is PyTorch's DistributedDataParallel of the whole
model on each rank: with as many replicas as ranks the peer. The library decides the partition; with
``--trace`` by measured costs, and then ``predicted_ms`` is what it expects of a step. Weights are
bf16 on GPUs; AdamW; random
tokens. Times are medians of device events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from gpt import device_milliseconds, peak_gib
from ranks import Prediction, memory_gib, print_kernels, slowest
from torch.nn.parallel import DistributedDataParallel

import smdistributed.modelparallel.torch as smp

#: By name: the class, its configuration, where its blocks are, and the length of a sequence.
MODELS: dict[str, tuple[str, transformers.PretrainedConfig, str, int]] = {
    "tiny": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            vocab_size=512,
            n_embd=64,
            n_layer=4,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        "transformer.h",
        64,
    ),
    "gpt2_xl": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            n_embd=1600, n_layer=48, n_head=25, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
        "transformer.h",
        1024,
    ),
    "llama_1.3b": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32
        ),
        "model.layers",
        2048,
    ),
    "tiny_llama": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
        ),
        "model.layers",
        64,
    ),
    "tiny_moe": (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=64,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        ),
        "model.layers",
        64,
    ),
    "moe_4b": (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig(
            vocab_size=32000,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=64,
            num_experts_per_tok=8,
            num_hidden_layers=12,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
        ),
        "model.layers",
        2048,
    ),
    "llama_7b": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
        ),
        "model.layers",
        2048,
    ),
}


#: What may stand behind a colon.
CHANGES = {"compile", "static", "eager", "loss", "float8", "uncached"}


class Bench:
    """What all runs share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kind, self.config, self.blocks, length = MODELS[options.model]
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", smp.local_rank())
        generator = torch.Generator().manual_seed(5 + smp.dp_rank())
        shape = (options.microbatches * options.microbatch_size, length)
        self.tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
        self.tokens = self.tokens.to(self.device)
        self.one_ms = 0.0
        self.prediction = Prediction()

    def build(self, changes: list[str]) -> Any:
        """Returns the model on the device."""
        torch.manual_seed(1)
        with self.device:
            model = getattr(transformers, self.kind)(self.config)
        if self.device.type == "cuda":
            model = model.to(torch.bfloat16)
        model.config.use_cache = "uncached" not in changes
        blocks = model.get_submodule(self.blocks)
        if "float8" in changes:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            emulated = Float8LinearConfig(emulate=self.device.type == "cpu")
            convert_to_float8_training(blocks, config=emulated)
        for block in blocks if "compile" in changes else ():
            block.compile()
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Returns AdamW."""
        cuda = self.device.type == "cuda"
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)

    def one(self, changes: list[str]) -> Callable[[], torch.Tensor]:
        """Returns a step on one device, without this library."""
        model = self.build(changes).train()
        optimizer = self.optimizer(model)
        count = self.options.microbatches

        def step() -> torch.Tensor:
            total = torch.zeros((), device=self.device)
            for part in self.tokens.chunk(count):
                loss = model(input_ids=part, labels=part).loss
                (loss / count).backward()
                total += loss.detach() / count
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    def ddp(self, changes: list[str]) -> Callable[[], torch.Tensor]:
        """Returns a step of PyTorch's replicas, which sum gradients in the last microbatch."""
        model = DistributedDataParallel(self.build(changes).train(), gradient_as_bucket_view=True)
        optimizer = self.optimizer(model)
        parts = self.tokens.chunk(self.options.microbatches)

        def step() -> torch.Tensor:
            total = torch.zeros((), device=self.device)
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = model(input_ids=part, labels=part).loss
                    (loss / len(parts)).backward()
                total += loss.detach() / len(parts)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    def smp(self, changes: list[str]) -> Callable[[], torch.Tensor]:
        """Returns a step of this library."""
        model = smp.DistributedModel(
            self.build(changes),
            trace_device="gpu" if self.options.trace else "cpu",
            trace_execution_times=self.options.trace,
        )
        optimizer = smp.DistributedOptimizer(self.optimizer(model))

        @smp.step(
            static="static" in changes,
            cuda_graphs=False if "eager" in changes else "auto",
            compile="loss" in changes,
        )
        def train(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss)
            return loss

        def step() -> torch.Tensor:
            loss: torch.Tensor = train(model, self.tokens).reduce_mean()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step.train = train  # type: ignore[attr-defined]
        return step

    def run(self, name: str) -> None:
        """Makes one run and prints a line."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        kind, *changes = name.split(":")
        step = {"smp": self.smp, "one": self.one, "ddp": self.ddp}[kind](changes)
        losses = [step().item()]
        for _ in range(self.options.warmup):
            step()
        times = device_milliseconds(step, self.options.steps)
        losses.append(step().item())
        row: dict[str, Any] = slowest({"ms": statistics.median(times), "gib": peak_gib()})
        memory = memory_gib() if kind == "smp" else None
        if kind == "one":
            self.one_ms = row["ms"]
        if smp.rank() == 0:
            size, count = smp.size(), self.options.microbatches
            row |= {
                "no_bubble_ms": round(self.one_ms / size, 2),
                "ideal_1f1b_ms": round(self.one_ms / size * (count + size - 1) / count, 2),
                "predicted_ms": self.prediction.milliseconds if kind == "smp" else None,
                "loss": losses,
                "memory_gib": memory,
            }
            print(json.dumps({"run": name, **vars(self.options), **row}), flush=True)
        if self.options.profile:
            print_kernels(step)


def run_name(word: str) -> str:
    """Returns the name of a run that there is.

    Raises:
        ValueError: there is none of that name.
    """
    kind, *changes = word.split(":")
    if kind in ("one", "smp", "ddp") and set(changes) <= CHANGES:
        return word
    raise ValueError(word)


def main() -> None:
    """Makes the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=run_name)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--pipeline", help="the order; by default what a job has that names none")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines")
    parser.add_argument("--memory-weight", type=float, help="in what is balanced, not the default")
    parser.add_argument("--trace", action="store_true", help="costs are measured on the device")
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", 1)))
    config = {
        "pipeline_parallel_degree": ranks // options.replicas,
        "ddp": options.replicas > 1,
        "microbatches": options.microbatches,
        "pipeline": options.pipeline,
        "memory_weight": options.memory_weight,
    }
    smp.init({name: value for name, value in config.items() if value is not None})
    bench = Bench(options)
    for name in options.runs:
        bench.run(name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
