"""One architecture trained for three steps, and what came out: the same code on both sides."""

from __future__ import annotations

import contextlib
import enum
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import registry
import torch
from architecture import Architecture, Batch, Shape, uses_cache
from torch import nn

import smdistributed.modelparallel.torch as smp

MICROBATCHES = 2
#: Rows and length of each training step: a shape twice, then another.
SHAPES = ((4, 16), (4, 16), (6, 12))
LEARNING_RATE = 0.01


class Variant(enum.Enum):
    """Under which conditions an architecture is tried.

    Attributes:
        NO_DROPOUT: the easy one: without dropout and cache, padding in each microbatch. Held
            against plain PyTorch; all others, which have dropout, against the library with one
            partition, whose random numbers are those of any partition.
        DROPOUT: as released, but for the cache.
        UNEVEN_PADDING: padding in one of the microbatches only.
        CACHE: ``use_cache`` as released, where that is True.
    """

    NO_DROPOUT = "no dropout"
    DROPOUT = "dropout"
    UNEVEN_PADDING = "uneven padding"
    CACHE = "cache"


class InapplicableError(Exception):
    """The architecture has nothing that the variant is about."""


@dataclass(frozen=True)
class Trial:
    """An architecture under one variant.

    Attributes:
        name: of the architecture.
        variant: what is special.
        in_double: computed in float64, where rounding cannot be taken for an error.
    """

    name: str
    variant: Variant
    in_double: bool = False

    @property
    def stem(self) -> str:
        """What its files are called."""
        return f"{self.name}.{self.variant.name.lower()}{'.float64' * self.in_double}"


@dataclass
class Failure:
    """An exception in a trial.

    Attributes:
        kind: "absent": no such architecture; "inapplicable": no such variant of it; "refused": the
            library says that it cannot; "crash": anything else; "hang": the time was up; "died":
            the process is gone.
    """

    kind: str
    reason: str
    details: str = ""


@dataclass
class Step:
    """What one step gave.

    Attributes:
        results: what the step function returned, a tensor a microbatch.
        gradients: of the parameters on this rank; empty for an evaluation.
    """

    results: dict[str, list[torch.Tensor]]
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """What was made of the linear maps and blocks of a model.

    Attributes:
        families: modules that a map of a family replaced.
        experts: stacks of experts that are spread.
        groups: blocks that were split as they are.
        linears: other linear maps that are split alone.
        whole: linear maps that every rank has.
    """

    families: int
    experts: int
    groups: int
    linears: int
    whole: int


@dataclass
class Record:
    """What a trial gave on one rank.

    Attributes:
        parts: what was made of the model by ``tensor_parallelism(auto=True)``.
        steps: three of training and one of evaluation.
        buffers: at the end, those on this rank.
        num_elements: of the parameters on this rank.
        visits: the rank of each segment of the forward pass; empty with one partition.
        in_turn: why microbatches run one after the other, as rank 0 is told; "" if they overlap.
        failure: why there is no more.
    """

    steps: list[Step] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    num_elements: int = 0
    visits: list[int] = field(default_factory=list)
    in_turn: str = ""
    parts: Parts | None = None
    failure: Failure | None = None


class _Plain:
    """A module with the calls that are made of a DistributedModel."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.local_named_parameters = module.named_parameters
        self.local_named_buffers = module.named_buffers

    def __call__(self, **batch: Any) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss / MICROBATCHES)


def _plain_step(body: Callable[..., Any]) -> Callable[..., Any]:
    def run(model: Any, batch: Batch) -> Any:
        results = []
        for part in range(MICROBATCHES):
            results.append(
                body(
                    model,
                    {
                        name: value.chunk(MICROBATCHES)[part]
                        if isinstance(value, torch.Tensor)
                        else value
                        for name, value in batch.items()
                    },
                )
            )
        return {name: [each[name].detach() for each in results] for name in results[0]}

    return run


def _smp_step(body: Callable[..., Any]) -> Callable[..., Any]:
    step = smp.step(body)

    def run(model: Any, batch: Batch) -> Any:
        return {name: list(out.outputs) for name, out in step(model, batch).items()}

    run.step = step  # type: ignore[attr-defined]
    return run


# What a trial does


def bodies(architecture: Architecture) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the bodies of the training and of the evaluation step, as scripts write them."""

    def results(output: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = getattr(output, "logits", None)
        return {"loss": loss} | ({"logits": logits} if isinstance(logits, torch.Tensor) else {})

    def train(model: Any, batch: Batch) -> Any:
        output = model(**batch)
        loss = architecture.loss(output)
        model.backward(loss)
        return results(output, loss)

    def evaluate(model: Any, batch: Batch) -> Any:
        output = model(**batch)
        return results(output, architecture.loss(output))

    return train, evaluate


def run_trial(trial: Trial, record: Record, *, plain: bool) -> None:
    """Trains and evaluates; notes in ``record`` what comes out, as far as it gets."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if trial.in_double else usual)
    try:
        _run_trial(trial, record, plain=plain)
    finally:
        torch.set_default_dtype(usual)


def _run_trial(trial: Trial, record: Record, *, plain: bool) -> None:
    architecture = registry.ARCHITECTURES[trial.name]
    _seed(0)
    variant = trial.variant
    with smp.tensor_parallelism(auto=True) if smp.is_initialized() else contextlib.nullcontext():
        module = architecture.build(
            dropout=variant is not Variant.NO_DROPOUT, cache=variant is Variant.CACHE
        )
    config: Any = module.config
    batches = [_batch(architecture, config, index, variant) for index in (*range(len(SHAPES)), 0)]
    _check_applicable(variant, config, batches[0])
    train_body, evaluate_body = bodies(architecture)
    wrap = _plain_step if plain else _smp_step
    if not plain and smp.tp_size() > 1:
        module = smp.DistributedModel(module)  # makes other parameters
    optimizer: Any = torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=0.9)
    is_wrapped = isinstance(module, smp.DistributedModel)
    model: Any = _Plain(module) if plain else module if is_wrapped else smp.DistributedModel(module)
    optimizer = optimizer if plain else smp.DistributedOptimizer(optimizer)
    train, evaluate = wrap(train_body), wrap(evaluate_body)
    if smp.is_initialized() and smp.tp_size() > 1:
        record.parts = _parts(model.get_module())
    _seed(1)
    for batch in batches[:-1]:
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = train(model, batch)
        record.in_turn = record.in_turn or _reason_of_turns(caught)
        gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.local_named_parameters()
        }
        record.steps.append(Step(results, gradients))
        record.num_elements = sum(each.numel() for _, each in model.local_named_parameters())
        record.visits = [] if plain else _visits(train)
        optimizer.step()
    module.eval() if plain else model.eval()
    with torch.no_grad():
        record.steps.append(Step(evaluate(model, batches[-1])))
    record.buffers = {name: buffer.clone() for name, buffer in model.local_named_buffers()}


def _reason_of_turns(caught: Sequence[warnings.WarningMessage]) -> str:
    """Returns what the library says of microbatches that do not overlap."""
    told = [str(each.message) for each in caught]
    return next((each for each in told if "run one after the other" in each), "")


def _check_applicable(variant: Variant, config: Any, batch: Batch) -> None:
    if variant is Variant.CACHE and not uses_cache(config):
        raise InapplicableError("its configuration does not ask for a cache.")
    if variant is Variant.UNEVEN_PADDING and "attention_mask" not in batch:
        raise InapplicableError("its batches have no padding.")


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _batch(architecture: Architecture, config: Any, index: int, variant: Variant) -> Batch:
    rows, length = SHAPES[index]
    half = rows // MICROBATCHES
    # The microbatch without padding is the second one first, then the first one.
    uneven = ((0,), (half,), (0,))[index]
    padded = uneven if variant is Variant.UNEVEN_PADDING else (0, half)
    torch.manual_seed(10 + index)
    batch = architecture.batch(config, Shape(rows, length, padded))
    if smp.is_initialized() and smp.pp_rank() > 0:
        batch = {
            name: value.new_empty((rows, *(0 for _ in value.shape[1:])))
            if isinstance(value, torch.Tensor)
            else value
            for name, value in batch.items()
        }
    if smp.is_initialized() and smp.tp_size() > 1:
        # A rank's own examples are what is a microbatch on one process.
        batch = {
            name: value.chunk(MICROBATCHES)[smp.tp_rank()]
            if isinstance(value, torch.Tensor)
            else value
            for name, value in batch.items()
        }
    return {
        name: value.to(torch.get_default_dtype())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in batch.items()
    }


def _parts(module: nn.Module) -> Parts:
    def number(kind: str) -> int:
        return sum(kind in (each.__name__ for each in type(m).__mro__) for m in module.modules())

    transformers = sum(type(each).__name__ == "SplitLinear" for each in module.modules())
    groups, experts = number("ClosedGroup"), number("SpreadExperts")
    distributed = number("DistributedModule")
    linears = number("DistributedLinear")
    return Parts(
        families=int(distributed > groups + experts + transformers + linears),
        experts=experts,
        groups=groups,
        linears=linears,
        whole=sum(type(each) is nn.Linear for each in module.modules()),
    )


def _visits(train: Any) -> list[int]:
    """Returns the rank of each segment. Collective, with more than one partition."""
    if smp.pp_size() == 1:
        return []
    ranks = train.step.timeline().ranks
    rank_of = {
        timed.action.segment: rank for rank, actions in enumerate(ranks) for timed in actions
    }
    return [rank for _, rank in sorted(rank_of.items())]
