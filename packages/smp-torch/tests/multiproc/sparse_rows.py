"""Sparse gradients where ranks add them up: numbers and rows are as in one process.

Optimizers of sparse gradients leave rows alone that are not there, whatever they have kept of them,
so each rank must know the rows of all. Crossed are layers, optimizers and what a loop does.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from reference import own_share, run_plain
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

ROWS, WIDTH, STEPS = 12, 4, 3
Parameters = list[nn.Parameter]


class Rows(nn.Module):
    """An embedding that is looked up, and a map behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, 3)

    def look_up(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.rows(numbers).mean(1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.look_up(numbers)))


class Bags(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)

    def look_up(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.rows(numbers)


class Padded(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH, padding_idx=1, sparse=True)


class Tied(Rows):
    """The rows have a dense gradient besides, so that all of it is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, ROWS, bias=False)
        self.last.weight = self.rows.weight


class Sometimes(Rows):
    """On some ranks, or in some steps, nothing is looked up."""

    def look_up(self, numbers: torch.Tensor) -> torch.Tensor:
        if int(numbers[0, 0]) % 3 == 0:
            return F.one_hot(numbers, WIDTH * 3)[..., :WIDTH].float().mean(1)
        return super().look_up(numbers)


class Two(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Embedding(ROWS + 1, WIDTH, sparse=True)

    def look_up(self, numbers: torch.Tensor) -> torch.Tensor:
        return super().look_up(numbers) * self.others(numbers.flip(1)[:, :1] + 1).sum(1)


LAYERS: Mapping[str, type[Rows]] = {
    each.__name__: each for each in (Rows, Bags, Padded, Tied, Sometimes, Two)
}
OPTIMIZERS: Mapping[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
}
#: What a loop does besides: clears no gradients; halves them; nothing wraps the optimizer.
LOOPS = ("usual", "added up", "halved", "unwrapped")


def body(model: Any, numbers: torch.Tensor) -> torch.Tensor:
    loss = model(numbers).square().mean()
    model.backward(loss)
    return loss.detach()


def rows_in(gradient: torch.Tensor | None) -> list[int]:
    if gradient is None or not gradient.is_sparse:
        return []
    return sorted(set(gradient._indices()[0].tolist()))


class Loop:
    """One of the two: parameters with a name, and optimizers of sparse and of dense gradients."""

    def __init__(self, module: nn.Module, optimizer: str, wrap: Callable[[Any], Any]) -> None:
        self.parameters = dict(module.named_parameters())
        tables = [each for name, each in self.parameters.items() if "last" not in name]
        others = [each for name, each in self.parameters.items() if "last" in name]
        is_sparse_alone = optimizer == "SparseAdam"
        chosen = [tables, others] if is_sparse_alone else [[*tables, *others]]
        makers = [OPTIMIZERS[optimizer], OPTIMIZERS["SGD"]]
        self.optimizers = [
            wrap(make(each)) for make, each in zip(makers, chosen, strict=False) if each
        ]

    def clear(self, loop: str) -> None:
        if loop != "added up":
            for each in self.optimizers:
                each.zero_grad()

    def seen(self) -> list[Any]:
        found = []
        for name, each in self.parameters.items():
            gradient = each.grad
            found.append((name, rows_in(gradient)))
        return found

    def update(self, loop: str) -> None:
        if loop == "halved":
            for each in self.parameters.values():
                if each.grad is not None:
                    each.grad.mul_(0.5)
        for optimizer in self.optimizers:
            optimizer.step()


def clip(parameters: Sequence[nn.Parameter]) -> None:
    """Clips as shards do: those of one optimizer, which torch's function does not for sparse."""
    bound = smp.state.cfg.sdp_gradient_clipping
    found = [each.grad for each in parameters if each.grad is not None]
    norm = torch.stack([each.to_dense().norm() for each in found]).norm() if found else 0.0
    for each in found:
        each.mul_(min(bound / (float(norm) + 1e-6), 1.0))


def outcome(layer: str, optimizer: str, loop: str) -> tuple[str, str]:
    """Returns what became of some steps, and what was said."""
    torch.manual_seed(5)
    module = LAYERS[layer]()
    plain = copy.deepcopy(module)

    def clipping(optimizer: Any) -> Any:
        if smp.state.cfg.sharded_data_parallel_degree > 1:
            given = [each for group in optimizer.param_groups for each in group["params"]]
            optimizer.register_step_pre_hook(lambda *_: clip(given))
        return optimizer

    try:
        theirs = Loop(plain, optimizer, clipping)
        want = []
        batches = [
            torch.randint(0, ROWS, (2 * smp.state.cfg.microbatches * smp.dp_size(), 2))
            for _ in range(STEPS)
        ]
        for batch in batches:
            theirs.clear(loop)
            run_plain(plain, body, [batch])
            want.append(theirs.seen())
            theirs.update(loop)
    except RuntimeError:
        return "not there", ""  # PyTorch has no such update
    try:
        model = smp.DistributedModel(module)
        wrap = (lambda each: each) if loop == "unwrapped" else smp.DistributedOptimizer
        ours, train, got = Loop(module, optimizer, wrap), smp.step(body), []
        for batch in batches:
            ours.clear(loop)
            train(model, *own_share([batch], [0]))
            got.append(ours.seen())
            ours.update(loop)
        state = model.state_dict()
    except SMPError as error:
        return "refused", str(error)
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"
    for name, value in plain.state_dict().items():
        if not torch.allclose(state[name].cpu(), value, atol=1e-5, rtol=1e-5):
            return "wrong", f"{name}: off by {(state[name].cpu() - value).abs().max()}"
    # Those of another partition are there, and those that another rank updates are not.
    is_all = smp.pp_size() == 1 and not smp.state.cfg.shard_optimizer_state
    return ("wrong", f"rows {got}, not {want}") if is_all and got != want else ("exact", "")


def ways() -> Iterator[tuple[str, str, str]]:
    yield from itertools.product(LAYERS, OPTIMIZERS, LOOPS)


def population(part: int, parts: int) -> dict[str, Any]:
    """Tries some of all; returns how many came to which end, and what was told of others."""
    counts: Counter[str] = Counter()
    told = {}
    for way in [*ways()][part::parts]:
        end, said = outcome(*way)
        counts[end] += 1
        if end not in ("exact", "not there"):
            told[", ".join(way)] = (end, said[:300])
    return {"counts": dict(counts), "told": told}
