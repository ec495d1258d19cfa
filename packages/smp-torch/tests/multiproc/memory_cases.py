"""What a rank holds, measured in bytes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing_cases import ROWS, WIDTH, Kept, Stack, plain
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.private.below import operated_by

MICROBATCHES = 8
#: Of malloc.h: blocks of at least so many bytes go back to the system when they are freed.
_M_MMAP_THRESHOLD = -3


def peak_bytes() -> int:
    """Returns the most memory that this process ever had resident."""
    return _of_status("VmHWM")


def _of_status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def num_bytes(tensors: Any) -> int:
    """Returns the memory of tensors that have any, what they share counted once."""
    with torch._C.DisableTorchFunctionSubclass():  # else that of what is elsewhere is not shown
        own = [each for each in tensors if operated_by(each) is None]
        storages = [each.untyped_storage() for each in own]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def delayed_model(degree: int, width: int, layers: int) -> dict[str, Any]:
    """Makes a model and partitions it; returns this rank's share of it and its peak."""
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 1})
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    model = smp.DistributedModel(module)

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    with torch.no_grad():
        evaluate(model, torch.randn(1, width))
    peak = peak_bytes()
    own = dict(model.local_named_parameters())
    # One after another, as the constructor did.
    torch.manual_seed(0)
    is_exact = True
    for index in range(layers):
        layer = nn.Linear(width, width)
        name = f"{index}.weight"
        is_exact = is_exact and (name not in own or torch.equal(own[name], layer.weight))
    return {"total": total, "own": num_bytes(own.values()), "peak": peak, "is_exact": is_exact}


class Tied(nn.Module):
    """A language model whose head is its embedding; large enough for its tensors to be delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.tokens.weight
        with torch.no_grad():
            for block in self.blocks:
                block.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.norm(x))


def delayed_training(degree: int, folder: str) -> dict[str, Any]:
    """Trains a delayed model and its immediate twin; returns the losses of each, and of a third,
    delayed too and of other weights, that goes on from the first one's checkpoint.
    """
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), x.flip(0))
        model.backward(loss)
        return loss

    def build(seed: int, delayed: bool) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        with smp.delay_param_initialization(delayed):
            module = Tied()
        assert module.head.weight is module.tokens.weight
        model = smp.DistributedModel(module)
        return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(model: Any, optimizer: Any, steps: int) -> list[list[float]]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            output = step(model, torch.randint(512, (16,)))
            optimizer.step()
            losses.append([loss.item() for loss in output.outputs])
        return losses

    found = {}
    for name, delayed in (("immediate", False), ("delayed", True)):
        model, optimizer = build(3, delayed)
        torch.manual_seed(4)
        found[name] = train(model, optimizer, 2)
        if delayed:
            smp.save_checkpoint(folder, tag="two", model=model, optimizer=optimizer)
        found[name] += train(model, optimizer, 2)
        found[f"{name} state"] = model.state_dict()
    del model, optimizer
    model, optimizer = build(5, delayed=True)
    smp.resume_from_checkpoint(folder, tag="two")
    found["resumed"] = train(model, optimizer, 2)
    found["resumed state"] = model.state_dict()
    return found


def training(degree: int, active_microbatches: int) -> dict[str, int]:
    """Trains; returns the bytes of this rank's parameters, of all live tensors, and kept ones."""
    config = {"microbatches": MICROBATCHES, "active_microbatches": active_microbatches}
    smp.init({"pipeline_parallel_degree": degree, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(Stack(plain))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    kept = Kept()

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).square().mean())

    def train() -> None:
        optimizer.zero_grad()
        step(model, torch.randn(MICROBATCHES * ROWS, WIDTH))
        optimizer.step()

    for _ in range(3):
        train()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        train()
    gc.collect()
    live = [
        each
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor)
    ]
    live += [each.grad for each in live if each.is_leaf and each.grad is not None]
    return {
        "own": num_bytes(model.local_parameters()),
        "live": num_bytes(each for each in live if not each.is_meta),
        "kept": kept.most,
    }


def limited_training(degree: int, width: int, layers: int, budget_bytes: int) -> dict[str, Any]:
    """Trains a model whose parameters are shared by so many ranks, in little memory.

    Args:
        degree: the number of ranks, 1 for none that share.
        width: of each of its layers.
        layers: of the model.
        budget_bytes: what the process may take beside what it has before the model is made.

    Returns:
        what it took beside that, at most; or the error of an allocation that was refused.
    """
    # glibc keeps what is freed in pieces for later, which is resident and nobody's.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    shared = {"sharded_data_parallel_degree": degree, "sdp_gradient_clipping": float("inf")}
    shared |= {"sdp_max_live_parameters": 4 * width**2, "sdp_reduce_bucket_size": width**2}
    smp.init({"ddp": True, "microbatches": 1, **(shared if degree > 1 else {})})

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def train(width: int) -> Any:
        torch.manual_seed(0)
        with smp.delay_param_initialization():
            module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(3):
            optimizer.zero_grad()
            losses = step(model, torch.ones(1, width)).outputs
            optimizer.step()
        return model, losses

    train(64)  # what code takes when it runs first is not the model's
    gc.collect()
    before = _of_status("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (_of_status("VmData") + budget_bytes,) * 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    try:
        model, losses = train(width)
    except (MemoryError, RuntimeError) as error:
        return {"error": str(error)}
    live = model.data_parallel.shards.model.residency.most_live
    return {
        "taken": peak_bytes() - before,
        "parameters": layers * width**2,
        "gathered": live,
        "bucket": width**2,
        "loss": losses[0].item(),
    }


def _trained(num_steps: int, rows: int) -> list[Any]:
    """Trains a small model; returns the report before each step, and the last one."""
    torch.manual_seed(0)
    # The rank of what others lack, and a frozen layer.
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    net[2].requires_grad_(False)
    dtype = torch.bfloat16 if smp.state.cfg.bf16 else torch.float32
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).float().square().mean())

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().mean()

    if smp.mp_size() > 1:
        with pytest.raises(SMPError, match="between steps"):
            smp.step(lambda: smp.memory())()

    x = torch.ones(rows, 256, dtype=dtype)
    evaluate(model, x)  # a model in a pipeline has its place then
    reports = [smp.memory()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        step(model, x)
        optimizer.step()
        reports.append(smp.memory())
    return reports


def foreseen() -> dict[str, tuple[int, int]]:
    """Returns by kind what was expected before training, and what there is after it."""
    before, *_, after = _trained(2, MICROBATCHES)
    assert sum(after.kinds.values()) == after.total
    assert after.total <= after.capacity
    assert list(after.kinds)[:4] == ["parameters", "gradients", "optimizer", "other tensors"]
    return {
        "parameters": (before.kinds["parameters"], after.kinds["parameters"]),
        "gradients": (before.expected["gradients"], after.kinds["gradients"]),
        "optimizer": (before.expected["optimizer"], after.kinds["optimizer"]),
    }


def foreseen_passes() -> dict[str, float]:
    """Returns what passes of a step were said to hold before it ran, and what one then took."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smdistributed")
    level, rows, width = logger.level, 512, 64
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        torch.manual_seed(0)
        layers = [[nn.Linear(width, width), nn.GELU()] for _ in range(24)]
        net = nn.Sequential(*(each for pair in layers for each in pair))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

        @smp.step
        def step(model: Any, x: torch.Tensor) -> None:
            model.backward(model(x).square().mean())

        x = torch.randn(MICROBATCHES * rows, width)

        def train() -> None:
            step(model, x)
            optimizer.step()

        if smp.pp_size() == 1:
            smp.memory(step, model, x)
            assert all(each.grad is None for each in model.local_parameters())
        train()
        expected = smp.memory().expected["activations"]
        assert sum("memory in training: " in line for line in told) == (smp.rank() == 0)
        train()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [each for each in events if each.name() == "[memory]"]
    sizes = [each.nbytes() for each in sorted(changes, key=lambda event: event.start_ns())]
    given = x.nbytes if smp.pp_rank() == 0 else 0  # is there before the step
    return {"expected": expected, "taken": max(itertools.accumulate(sizes)) + given}


def out_of_memory(kind: str) -> None:
    """Trains with a batch that the last rank has no memory for; ends by an error."""
    config = {"pipeline_parallel_degree": 2} if kind == "pipeline" else {"ddp": True}
    smp.init({"microbatches": 2, **config})
    if smp.rank() == smp.size() - 1:
        resource.setrlimit(resource.RLIMIT_DATA, (_of_status("VmData") + 2**25,) * 2)
    _trained(1, 2**16)
