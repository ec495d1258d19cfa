"""What published scripts do around a model, on a pipeline of two ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from world import manual_pipeline, run

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing import Worlds, cases_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


class Notes(logging.Handler):
    """Keeps log messages past a run on fakes, which puts back what it changes in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Curious(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger(__name__).warning("%s", (smp.is_tracing(), x.is_floating_point()))
        return super().forward(x)


@smp.step()
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step()
def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    return result


def build(kind: type[nn.Linear] = nn.Linear) -> smp.DistributedModel:
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    for index, layer in enumerate(model):
        smp.set_partition(layer, index)
    return smp.DistributedModel(model)


def case_post_step_hook() -> None:
    model = build()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[tuple[Any, Any, bool]] = []

    def hook(given: Any, given_optimizer: Any) -> None:
        has_gradients = all(each.grad is not None for each in given.local_parameters())
        seen.append((given, given_optimizer, has_gradients))

    model.register_post_step_hook(hook)
    with torch.no_grad():
        evaluate(model, torch.randn(4, 4))
    assert seen == []
    train(model, torch.randn(4, 4))
    train(model, torch.randn(4, 4))
    assert seen == [(model, optimizer, True)]


def case_post_partition_hook() -> None:
    model = build()
    seen: list[bool] = []
    model.register_post_partition_hook(lambda: seen.append(model.partitioned))
    model.register_post_partition_hook(lambda: seen.append(False)).remove()
    for _ in range(2):
        evaluate(model, torch.randn(4, 4))
    assert seen == [True]


def messages_of_tracing() -> list[str]:
    model = build(Curious)
    notes = Notes()
    logger = logging.getLogger(__name__)
    logger.propagate = False
    logger.addHandler(notes)
    evaluate(model, torch.randn(4, 4))
    first, notes.messages = notes.messages, []
    evaluate(model, torch.randn(4, 4))
    logger.removeHandler(notes)
    assert "(True, True)" in first
    assert not smp.is_tracing()
    return notes.messages


def case_chains_of_module() -> None:
    model = build()
    train(model, torch.randn(4, 4))
    assert model.module.module is model.get_module()
    assert not hasattr(model.get_module(), "module")
    assert next(name for name, _ in model.module.named_parameters()) == "module.0.weight"
    local = [name for name, _ in model.local_named_parameters()]
    assert [name for name, _ in model.default_reducer_named_parameters()] == local


class Careful(nn.Linear):
    """Tries something that fails, and then does it another way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = x @ torch.ones(3, 3)
        except RuntimeError:
            x = x * 2
        return super().forward(x)


def case_failures_that_are_caught_are_not_logged() -> None:
    notes = Notes()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(notes)
    try:
        evaluate(build(Careful), torch.randn(4, 4))
    finally:
        logger.removeHandler(notes)
    assert notes.messages == []


WORLD = manual_pipeline(2, microbatches=2)


@pytest.mark.parametrize("case", cases_of(globals()))
def test_case(worlds: Worlds, case: str) -> None:
    run(worlds, WORLD, cases_of(globals())[case])


def test_only_the_own_module_runs_for_real_and_is_not_traced_then(worlds: Worlds) -> None:
    first, second = run(worlds, WORLD, messages_of_tracing)
    assert first == []
    assert second == ["(False, True)"] * 2
