"""What published scripts do around a model, on a pipeline of two ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from world import Result, run_cases, values

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


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


def post_step_hook() -> None:
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


def post_partition_hook() -> None:
    model = build()
    seen: list[bool] = []
    model.register_post_partition_hook(lambda: seen.append(model.partitioned))
    model.register_post_partition_hook(lambda: seen.append(False)).remove()
    for _ in range(2):
        evaluate(model, torch.randn(4, 4))
    assert seen == [True]


def is_tracing() -> list[str]:
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


def chains_of_module() -> None:
    model = build()
    train(model, torch.randn(4, 4))
    assert model.module.module.module is model.get_module()
    assert next(name for name, _ in model.module.named_parameters()) == "module.0.weight"
    local = [name for name, _ in model.local_named_parameters()]
    assert [name for name, _ in model.default_reducer_named_parameters()] == local


CASES: dict[str, Callable[[], Any]] = {
    "post_step_hook": post_step_hook,
    "post_partition_hook": post_partition_hook,
    "is_tracing": is_tracing,
    "chains_of_module": chains_of_module,
}


def body() -> dict[str, Result]:
    config = {
        "pipeline_parallel_degree": 2,
        "microbatches": 2,
        "auto_partition": False,
        "default_partition": 0,
    }
    return run_cases(config, CASES)


@pytest.fixture(scope="module")
def results() -> Any:
    return run_ranks(2, body, timeout=90).results


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"is_tracing"}))
def test_case(name: str, results: Any) -> None:
    values(results, name)


def test_only_the_own_module_runs_for_real_and_is_not_traced_then(results: Any) -> None:
    first, second = values(results, "is_tracing")
    assert first == []
    assert second == ["(False, True)"] * 2
