"""Time of one training step of a GPT: this library beside PyTorch's own pipelining.

Start it with one process a GPU (or with several on the CPU, for a look at the code paths):

    torchrun --nproc-per-node 2 benchmarks/torch/gpt_step.py --size 1.3b smp 1f1b smp 1f1b

Every word names a run; they share the processes, so that their ratio means something. What stands
behind a colon changes it: ``smp:static`` (``smp.step(static=True)``), ``smp:eager``
(``smp.step(cuda_graphs=False)``), ``smp:compile`` and ``1f1b:compile`` (each block by
``torch.compile``), ``smp:loss`` (``smp.step(compile=True)``) and ``1f1b:loss`` (the loss by
``torch.compile``). With ``--trace`` orders follow from measured costs, and ``predicted_ms`` is
what the library expects of a step. ``--replicas`` pipelines share the processes; each trains on a
batch of its own, by ``smp`` alone. Weights are bf16 on GPUs; AdamW; random tokens.
Times are medians of device events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, device_milliseconds, loss_of, peak_gib
from ranks import Prediction, memory_gib, print_kernels, slowest
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import smdistributed.modelparallel.torch as smp

KINDS = {"smp": ("static", "eager", "compile", "loss"), "1f1b": ("compile", "loss")}
#: What the last norm and the head cost, in blocks.
_HEAD_BLOCKS = 2.5


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Deals blocks out so that the slowest stage, the head with the last, is as short as can be."""
    cost = [0.0] * (stages - 1) + [_HEAD_BLOCKS]
    found = [0] * stages
    for _ in range(layers):
        stage = min(range(stages), key=lambda each: (cost[each], each))
        found[stage] += 1
        cost[stage] += 1
    return found


class Bench:
    """What all runs share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size = SIZES[options.size]
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", smp.local_rank())
        generator = torch.Generator().manual_seed(5 + smp.dp_rank())
        shape = (options.microbatches * options.microbatch_size, self.size.length + 1)
        tokens = torch.randint(self.size.vocabulary, shape, generator=generator)
        self.x, self.y = (part.to(self.device) for part in (tokens[:, :-1], tokens[:, 1:]))
        self.stages = layers_of_stages(self.size.layers, smp.pp_size())
        self.changes: list[str] = []
        self.prediction = Prediction()

    def build(self, layers: int, **ends: bool) -> GPT:
        """Returns a model on the device."""
        torch.manual_seed(1)
        with self.device:
            model = GPT(self.size, layers, **ends)
        if "compile" in self.changes:
            for block in model.blocks:
                block.compile()
        return model.to(torch.bfloat16) if self.device.type == "cuda" else model

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.device.type == "cuda")

    def smp(self) -> Callable[[], torch.Tensor]:
        """Returns a step of this library."""
        model = self.build(self.size.layers)
        if self.options.partition == "stages":
            self._fix(model)
        distributed = smp.DistributedModel(
            model,
            trace_device="gpu" if self.options.trace else "cpu",
            trace_execution_times=self.options.trace,
        )
        optimizer = smp.DistributedOptimizer(self.optimizer(model.parameters()))

        @smp.step(
            static="static" in self.changes,
            cuda_graphs=False if "eager" in self.changes else "auto",
            compile="loss" in self.changes,
        )
        def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model(x), y)
            model.backward(loss)
            return loss

        def step() -> torch.Tensor:
            loss = train(distributed, self.x, self.y).reduce_mean()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step.train = train  # type: ignore[attr-defined]
        return step

    def _fix(self, model: GPT) -> None:
        """Gives each rank the blocks that a stage of the other runs has."""
        for ends, rank in ((("tokens", "positions"), 0), (("norm", "head"), smp.pp_size() - 1)):
            for name in ends:
                smp.set_partition(getattr(model, name), rank)
        owners = [rank for rank, layers in enumerate(self.stages) for _ in range(layers)]
        for block, rank in zip(model.blocks, owners, strict=True):
            smp.set_partition(block, rank)

    def chain(self) -> Callable[[], torch.Tensor | None]:
        """Returns a step of PyTorch's Schedule1F1B."""
        rank, size, count = smp.rank(), smp.size(), self.options.microbatches
        ends = {"first": rank == 0, "last": rank == size - 1}
        part = self.build(self.stages[rank], **ends)
        optimizer = self.optimizer(part.parameters())
        computed = torch.compile(loss_of) if "loss" in self.changes else loss_of
        schedule = Schedule1F1B(
            PipelineStage(part, rank, size, self.device),
            count,
            loss_fn=lambda logits, targets: computed(logits, targets) / count,
            scale_grads=False,
        )

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            given = [self.x] if ends["first"] else []
            wanted = {"target": self.y, "losses": losses} if ends["last"] else {}
            schedule.step(*given, **wanted, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).sum().detach() if ends["last"] else None

        return step

    def milliseconds(self, step: Callable[[], Any]) -> list[float]:
        """Times steps after a warm-up, on the device."""
        for _ in range(self.options.warmup):
            step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier()
        return device_milliseconds(step, self.options.steps)

    def run(self, name: str) -> None:
        """Makes one run and prints a line."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        kind, *self.changes = name.split(":")
        step: Any = {"smp": self.smp, "1f1b": self.chain}[kind]()
        start = time.perf_counter()
        loss = step()
        first_seconds = time.perf_counter() - start
        times = self.milliseconds(step)
        last = step()
        host = self._host_milliseconds(step)
        own = {
            "ms": statistics.median(times),
            "min_ms": min(times),
            "gib": peak_gib(),
            "first_s": first_seconds,
            "host_ms": host,
        }
        row: dict[str, Any] = slowest(own)
        losses = smp.allgather(None if loss is None else [loss.item(), last.item()], smp.WORLD)
        memory = memory_gib()
        if smp.rank() == 0:
            row["loss"] = next(filter(None, losses))
            row["memory_gib"] = memory
            row["predicted_ms"] = self.prediction.milliseconds if kind == "smp" else None
            print(json.dumps({"run": name, **vars(self.options), **row}), flush=True)
        if self.options.profile:
            print_kernels(step)

    def _host_milliseconds(self, step: Callable[[], Any]) -> float:
        """Returns how long the host takes to submit a step while the device is busy."""
        if self.device.type == "cpu":
            return 0.0
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)


def run_name(word: str) -> str:
    """Returns the name of a run that there is.

    Raises:
        ValueError: there is none of that name.
    """
    kind, *changes = word.split(":")
    if set(changes) <= set(KINDS.get(kind, ())) and kind in KINDS:
        return word
    raise ValueError(word)


def main() -> None:
    """Makes the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=run_name)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="of the pipeline")
    parser.add_argument("--active", type=int, default=0, help="microbatches in flight")
    parser.add_argument(
        "--pipeline",
        choices=["interleaved", "zero_bubble", "zero_bubble_v", "auto", "simple"],
        default="interleaved",
    )
    parser.add_argument("--partition", choices=["stages", "auto"], default="stages")
    parser.add_argument("--memory-weight", type=float, default=0.0, help="in what is balanced")
    parser.add_argument("--trace", action="store_true", help="costs are measured on the device")
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", 1)))
    config: dict[str, object] = {
        "pipeline_parallel_degree": ranks // options.replicas,
        "ddp": options.replicas > 1,
        "microbatches": options.microbatches,
        "pipeline": options.pipeline,
        "auto_partition": options.partition == "auto",
        "memory_weight": options.memory_weight,
    }
    if options.partition == "stages":
        config["default_partition"] = 0
    if options.active:
        config["active_microbatches"] = options.active
    smp.init(config)
    bench = Bench(options)
    for name in options.runs:
        bench.run(name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
