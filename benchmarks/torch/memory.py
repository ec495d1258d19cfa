"""The memory that a step is forecast to take on each rank, beside what it takes.

Start it with as many processes as the world takes; models are small, so that the CPU does:

    torchrun --nproc-per-node 2 benchmarks/torch/memory.py --world chain gpt

Worlds are ``chain`` and ``v`` (two partitions), ``shards`` and ``slices`` (two ranks each), and
``mixed`` (two partitions of two slices, four processes). A line has the forecast that the library
makes before the first step, the peak of a step from the third on, and their ratio, for the rank on
which it is furthest from one. On a CPU ``allocated.c`` counts what PyTorch allocates, on GPUs its
allocator does.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gpt import GPT, Size, loss_of
from torch import nn

import smdistributed.modelparallel.torch as smp

WORLDS: dict[str, dict[str, Any]] = {
    "chain": {"pipeline_parallel_degree": 2, "pipeline": "interleaved"},
    "halves": {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"},
    "v": {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble_v", "memory_weight": 0.0},
    "shards": {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
    },
    "slices": {"ddp": True, "tensor_parallel_degree": 2},
    "mixed": {"ddp": True, "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
}
#: In the environment of a process that counts: where its library is.
_COUNTING = "SMP_BENCHMARK_COUNTING"
HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH = 128, 8, 4, 1024, 128


class Scored(nn.Module):
    """The GPT of the other benchmarks, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(Size(LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH), LAYERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross entropy of the tokens that follow."""
        return loss_of(self.model(tokens), tokens)


class Told(nn.Module):
    """A model of Transformers, of which the loss alone is returned.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the tokens that follow."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    return Told(transformers.LlamaForCausalLM(config))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.0,
    )
    return Told(transformers.GPT2LMHeadModel(config))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": Scored, "llama": _llama, "gpt2": _gpt2}


class Allocated:
    """The most that tensors of this process take while a part of the program runs."""

    def __init__(self) -> None:
        self._library = None if torch.cuda.is_available() else ctypes.CDLL(None)
        if self._library is not None:
            self._library.allocated_most.restype = ctypes.c_size_t

    def most_in(self, part: Callable[[], Any]) -> int:
        """Runs a part of the program; returns the most that tensors took meanwhile."""
        if self._library is not None:
            self._library.allocated_forget()
            part()
            return int(self._library.allocated_most())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        part()
        return torch.cuda.max_memory_allocated()


def _count_from_the_start() -> None:
    """Begins this process again with the library that counts, where it computes on the CPU."""
    if torch.cuda.is_available() or _COUNTING in os.environ:
        return
    source = Path(__file__).with_name("allocated.c")
    library = Path(tempfile.gettempdir()) / f"allocated-{os.getuid()}-{os.getpid()}.so"
    command = [
        "cc",
        "-O2",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(source),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    os.environ |= {"LD_PRELOAD": str(library), _COUNTING: str(library)}
    os.execv(sys.executable, [sys.executable, *sys.argv])


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Trains a model for three steps; returns this rank's forecast and peak."""
    allocated = Allocated()
    torch.manual_seed(0)
    world = options.world
    with smp.tensor_parallelism(world in ("slices", "mixed"), auto=True):
        module = MODELS[options.model]()
    model = smp.DistributedModel(module)
    del module
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        model.backward(loss)
        return loss

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(VOCABULARY, (options.batch, LENGTH), device=device)

    def step() -> None:
        optimizer.zero_grad()
        train(model, tokens)
        optimizer.step()

    if smp.pp_size() == 1:
        forecast = smp.memory(train, model, tokens)
    step()
    if smp.pp_size() > 1:
        forecast = smp.memory()
    step()
    gc.collect()
    # What threads of gloo let go of too late is there in some steps, and not in others.
    peak = min(allocated.most_in(step) for _ in range(3))
    return {"model": options.model, "world": world, "forecast": forecast, "peak": peak}


def main() -> None:
    """Measures the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    # In pipelines what passes hold is forecast where this level is logged.
    logging.getLogger("smdistributed").setLevel(logging.INFO)
    smp.init({**WORLDS[options.world], "microbatches": options.microbatches})
    found = smp.allgather(measured(options), smp.WORLD)
    if smp.rank() == 0:
        print(json.dumps(_line(found)), flush=True)


def _line(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what is printed of a model: forecast and peak of the rank that is most off."""
    forecasts = [_forecast(each["forecast"]) for each in found]
    ratios = [all_ / each["peak"] for all_, each in zip(forecasts, found, strict=True)]
    rank = max(range(len(ratios)), key=lambda place: abs(ratios[place] - 1))
    report = found[rank]["forecast"]
    return {
        "model": found[rank]["model"],
        "world": found[rank]["world"],
        "rank": rank,
        "forecast_mib": round(forecasts[rank] / 2**20, 1),
        "activations_mib": round(report.expected["activations"] / 2**20, 1),
        "peak_mib": round(found[rank]["peak"] / 2**20, 1),
        "ratio": round(ratios[rank], 3),
        "ratios": [round(each, 3) for each in ratios],
    }


def _forecast(report: Any) -> int:
    """Returns the bytes of tensors that training was forecast to take."""
    kinds = ("parameters", "gathered", "gradients", "optimizer", "activations")
    return sum(max(report.kinds.get(kind, 0), report.expected.get(kind, 0)) for kind in kinds)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _count_from_the_start()
    main()
