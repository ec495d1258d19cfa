"""What the library costs on the host: a pipeline on two CPU cores beside plain PyTorch.

    smprun -n 2 benchmarks/torch/host.py throughput overhead first python

``throughput``: a step of two partitions against the same step in one process. Two processes that
share a machine slow each other down, library or not, so two independent ones run side by side too:
the ideal is what a perfect pipeline would gain over one process (M * P / (M + P - 1)) times what
two processes gain (``ceiling``) over the two that there are.

``overhead``: CPU time of the executing thread for each action, without the modules, the glue and
the backward passes themselves; ``transfers`` is the part of it in which messages are handed to
torch.distributed and awaited.

``first``: seconds of the first call of a step function, beside those of the second: what recording,
partitioning and planning cost.

``python``: milliseconds a microbatch in which the Python of a step runs before it is computed, for
models of Transformers, beside a forward pass of the same model in PyTorch; both at widths at
which computing costs next to nothing. With ``static`` it is left out but for a check.

``causes``: milliseconds of the host that a training step takes, by what takes them, with gradients
of weights that wait; blocks eager and compiled, the Python of the step in lockstep and static.
There are 24 blocks so narrow that computing costs next to nothing. On the CPU it is CPU time of the
thread. ``--cuda`` tells what it takes to keep GPUs busy: there it is time of the clock, because
backward passes are submitted by another thread, and it ends before the device does.

Everything is paired within a run; medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from gpt import GPT, Size, loss_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.execute.executor import Executor
from smdistributed.modelparallel.torch.execute.links import Links, Transfer
from smdistributed.modelparallel.torch.execute.passes import Computation
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.optimizer.distributed import DistributedOptimizer
from smdistributed.modelparallel.torch.stepping.inputs import StepInputs
from smdistributed.modelparallel.torch.stepping.lockstep import Lockstep
from smdistributed.modelparallel.torch.stepping.static import StaticPasses

MICROBATCHES = 8


def make(
    size: Size, microbatch_size: int, device: torch.device
) -> tuple[GPT, torch.Tensor, torch.Tensor]:
    """Returns a model and a batch."""
    torch.manual_seed(1)
    shape = (MICROBATCHES * microbatch_size, size.length + 1)
    tokens = torch.randint(size.vocabulary, shape).to(device)
    return GPT(size, size.layers).to(device), tokens[:, :-1], tokens[:, 1:]


def distributed(model: GPT) -> Callable[..., Any]:
    """Returns a training step of this library, without its optimizer."""
    wrapped = smp.DistributedModel(model)

    @smp.step
    def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        model.backward(loss)
        return loss

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wrapped.zero_grad()
        return train(wrapped, x, y).reduce_mean()

    return step


def plain(model: GPT) -> Callable[..., Any]:
    """Returns the same step in plain PyTorch."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        total = torch.zeros((), device=x.device)
        for part_x, part_y in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = loss_of(model(part_x), part_y) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    return step


def seconds(step: Callable[[], object], repeats: int) -> float:
    """Returns the mean time of a step, from a barrier on; on every rank that takes part."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def throughput(options: argparse.Namespace) -> dict[str, float]:
    """Compares the pipeline with one process, and with two independent ones."""
    size = Size(12, options.hidden, 8, 512, 128)
    model, x, y = make(size, 2, options.device)
    own = plain(make(size, 2, options.device)[0])
    pipeline = distributed(model)
    assert torch.allclose(pipeline(x, y), own(x, y), rtol=1e-5)
    pipeline(x, y)
    rounds = []
    for _ in range(options.rounds):
        smp.barrier()
        alone = seconds(lambda: own(x, y), 2) if smp.rank() == 0 else 0.0
        smp.barrier()
        together = seconds(lambda: own(x, y), 2)
        smp.barrier()
        split = seconds(lambda: pipeline(x, y), 2)
        rounds.append(smp.allgather((alone, together, split), smp.WORLD))
    ranks = smp.size()
    ideal = MICROBATCHES * ranks / (MICROBATCHES + ranks - 1)
    rows = []
    for each in rounds:
        alone = max(one[0] for one in each)
        together = max(one[1] for one in each)
        split = max(one[2] for one in each)
        ceiling = ranks * alone / together
        rows.append((alone / split, ceiling, alone / split / (ideal * ceiling / ranks)))
    speedup, ceiling, share = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"speedup": speedup, "ceiling": ceiling, "share_of_ideal": share}


def overhead(options: argparse.Namespace) -> dict[str, float]:
    """Measures the executor's own CPU time an action."""
    size = Size(12, 32, 4, 64, 16)
    model, x, y = make(size, 1, options.device)
    spent = {"work": 0.0, "transfers": 0.0}
    outer = 0.0
    actions = 0

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[kind] += time.thread_time() - start

        return run

    init, execute = Program.__init__, Executor.run

    def init_program(self: Program, *args: Any) -> None:
        init(self, *args)
        self.run = counted("work", self.run)

    def run_executor(self: Executor, *args: Any) -> Any:
        nonlocal outer, actions
        start = time.thread_time()
        marks = execute(self, *args)
        outer += time.thread_time() - start
        actions += len(marks)
        return marks

    with (
        mock.patch.object(Program, "__init__", init_program),
        mock.patch.object(Executor, "run", run_executor),
        mock.patch.object(torch.autograd, "backward", counted("work", torch.autograd.backward)),
        mock.patch.object(Links, "send", counted("transfers", Links.send)),
        mock.patch.object(Links, "receive", counted("transfers", Links.receive)),
        mock.patch.object(Transfer, "wait", counted("transfers", Transfer.wait)),
    ):
        step = distributed(model)
        for _ in range(3):
            step(x, y)
        found = []
        for _ in range(options.rounds):
            spent.update(work=0.0, transfers=0.0)
            outer = 0.0
            actions = 0
            for _ in range(10):
                step(x, y)
            found.append((outer - spent["work"], spent["transfers"], actions))
    names = ("microseconds_an_action", "of_these_transfers")
    own = [statistics.median(1e6 * each[i] / each[2] for each in found) for i in range(len(names))]
    return dict(zip(names, max(smp.allgather(own, smp.WORLD)), strict=True))


def first(options: argparse.Namespace) -> dict[str, float]:
    """Times the first call of a step function."""
    found = []
    for _ in range(options.rounds):
        model, x, y = make(Size(12, 64, 4, 512, 64), 1, options.device)
        step = distributed(model)
        smp.barrier()
        calls = [seconds(lambda: step(x, y), 1) for _ in range(3)]  # noqa: B023 - used at once
        found.append((calls[0], calls[2]))
    one, other = (statistics.median(column) for column in zip(*found, strict=True))
    return {"first_s": one, "later_s": other}


def transformers_models() -> dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """Returns what makes each model, and what makes a batch for it; narrow, of the usual depth."""
    import transformers

    def tokens(**more: Any) -> dict[str, Any]:
        ids = torch.randint(96, (MICROBATCHES, 16))
        return {"input_ids": ids, "labels": ids, **more}

    def causal(config: Any) -> Callable[[], Any]:
        return lambda: transformers.AutoModelForCausalLM.from_config(config)

    gpt2 = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=12, n_head=4)
    llama = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=24,
        num_attention_heads=4,
    )
    t5 = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_heads=4, decoder_start_token_id=0
    )
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128])
    return {
        "gpt2_12": (causal(gpt2), tokens),
        "llama_24": (causal(llama), tokens),
        "t5_6_6": (lambda: transformers.T5ForConditionalGeneration(t5), tokens),
        "resnet_50": (
            lambda: transformers.ResNetForImageClassification(resnet),
            lambda: {
                "pixel_values": torch.randn(MICROBATCHES, 3, 64, 64),
                "labels": torch.zeros(MICROBATCHES, dtype=torch.long),
            },
        ),
    }


def python(options: argparse.Namespace) -> dict[str, float]:
    """Times the Python of steps that are known, where the inputs are: on rank 0."""
    row = {}
    times: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                times.append(time.perf_counter() - start)

        return run

    for name, (make_model, make_batch) in transformers_models().items():
        torch.manual_seed(0)
        net, batch = make_model(), make_batch()
        part = {key: value[:1] for key, value in batch.items()}
        for _ in range(2):
            net(**part)
        eager = statistics.median(seconds(lambda: net(**part), 1) for _ in range(20))  # noqa: B023
        model = smp.DistributedModel(net)

        def body(model: Any, batch: dict[str, Any]) -> torch.Tensor:
            loss: torch.Tensor = model(**batch)["loss"]
            model.backward(loss)
            return loss

        row[f"{name}_eager_ms"] = 1e3 * eager
        for kind, passes in (("lockstep", Lockstep), ("static", StaticPasses)):
            step = smp.step(body, static=passes is StaticPasses)
            for _ in range(3):
                step(model, batch)
            with mock.patch.object(passes, "passes", timed(passes.passes)):
                for _ in range(4 * options.rounds):
                    step(model, batch)
            milliseconds = [1e3 * each / MICROBATCHES for each in times] or [0.0]
            row[f"{name}_{kind}_ms"] = statistics.median(milliseconds)
            times.clear()
    return row


#: What takes the host's time in a step: whose method it is, and what it is called here.
CAUSES: dict[str, tuple[tuple[type, str], ...]] = {
    "refresh": ((smp.DistributedModel, "refresh"),),
    "agree": ((StepInputs, "agree"),),
    "python": ((Lockstep, "_lead"), (Lockstep, "_follow")),
    "inputs": ((StepInputs, "exchange"),),
    "forward": ((Computation, "_forward"),),
    "input_gradients": ((Computation, "_input_gradients"),),
    "weight_gradients": ((Computation, "_weight_gradients"),),
    "transfers": ((Links, "send"), (Links, "receive"), (Transfer, "wait")),
    "executor": ((Executor, "run"),),
    "optimizer": ((DistributedOptimizer, "step"), (DistributedOptimizer, "zero_grad")),
}


def causes(options: argparse.Namespace) -> dict[str, float]:
    """Measures what takes the host's time in a step: of the slowest rank, and of each cause."""
    clock = time.perf_counter if options.cuda else time.thread_time
    spent: Counter[str] = Counter()
    inner: list[float] = []

    def counted(cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = clock() - start
                spent[cause] += whole - inner.pop()
                if inner:
                    inner[-1] += whole

        return run

    row = {}
    with contextlib.ExitStack() as stack:
        for cause, methods in CAUSES.items():
            for owner, name in methods:
                replaced = counted(cause, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, replaced))
        for kind in ("eager", "compiled", "static", "static_compiled"):
            step = _trained("compiled" in kind, "static" in kind, options.device)
            for _ in range(4):
                step()
            found = []
            for _ in range(4 * options.rounds):
                if options.cuda:
                    torch.cuda.synchronize()
                smp.barrier()
                spent.clear()
                counted("rest", step)()
                found.append(dict(spent))
            own = {
                cause: 1e3 * statistics.median(each.get(cause, 0.0) for each in found)
                for cause in (*CAUSES, "rest")
            }
            own["whole"] = 1e3 * statistics.median(sum(each.values()) for each in found)
            slowest = max(smp.allgather(own, smp.WORLD), key=lambda each: each["whole"])
            row |= {f"{kind}_{cause}_ms": value for cause, value in slowest.items()}
            del step
            gc.collect()  # a model that lives on is looked after in every step
    return row


def _trained(compiled: bool, static: bool, device: torch.device) -> Callable[[], object]:
    """Returns a training step with an optimizer."""
    model, x, y = make(Size(24, 32, 4, 64, 16), 1, device)
    for block in model.blocks if compiled else ():
        block.compile()
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(wrapped.parameters(), fused=device.type == "cuda")
    )

    @smp.step(static=static)
    def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        model.backward(loss)
        return loss

    def step() -> None:
        train(wrapped, x, y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Makes the measurements that the command line names."""
    measurements = {each.__name__: each for each in (throughput, overhead, first, python, causes)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=measurements)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256, help="of throughput's model")
    parser.add_argument("--cuda", action="store_true", help="compute on GPUs, but for python")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = "zero_bubble" if options.names == ["causes"] else "interleaved"
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "pipeline": pipeline})
    options.device = torch.device("cuda", smp.local_rank()) if options.cuda else torch.device("cpu")
    for name in options.names:
        row = measurements[name](options)
        if smp.rank() == 0:
            row = {key: round(value, 3) for key, value in row.items()}
            print(json.dumps({"measured": name, **row}), flush=True)


if __name__ == "__main__":
    main()
