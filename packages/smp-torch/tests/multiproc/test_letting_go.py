"""A step function of several partitions lets go of models that the script has let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from boxed import share_memory
from host_graphs import capture_every_step
from reference import MICROBATCHES
from torch import nn
from world import PRELOAD, compute_here, run, without_fork

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

WIDTH = 4
#: Of passes that are captured, all kinds of calls have come then.
STEPS = 4


def start(captures: bool) -> None:
    if captures:
        share_memory()
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "communication_timeout": 20,
        }
    )
    compute_here()
    if captures:
        capture_every_step()


WORLDS = {
    name: World(2, start, (name == "graphs",), without_fork(2, "fork"), preload=PRELOAD)
    for name in ("pp2", "graphs")
}


def body(model: Any, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def asking(model: Any, x: torch.Tensor) -> Any:
    out = model(x)
    if out.detach().mean() > 0:
        out = out * 2
    loss = out.square().mean()
    model.backward(loss)
    return loss


def trained(step: Any) -> tuple[Any, list[weakref.ref[Any]]]:
    """Returns a model that was trained, and what is to go with it."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(model, torch.ones(2 * MICROBATCHES, WIDTH))
        optimizer.step()
    parts = (model, optimizer, net, *net, *net.parameters())
    return model, [weakref.ref(each) for each in parts]


def alive(parts: list[weakref.ref[Any]]) -> list[str]:
    """Returns what is still there: a step function lets go of what a model had when that goes."""
    gc.collect()
    gc.collect()
    return [type(each()).__name__ for each in parts if each() is not None]


def one_after_another(static: bool, asks: bool = False) -> list[Any]:
    """Returns what is alive of each of two models, and whether a timeline is left."""
    step = smp.step(asking if asks else body, static=static)
    found: list[Any] = [alive(trained(step)[1]) for _ in range(2)]
    return [*found, bool(step.timeline().ranks)]


def two_in_turn() -> list[list[str]]:
    """Returns what is alive of a model after the next call with another one, and of that."""
    step = smp.step(body)
    first, parts = trained(step)
    second, others = trained(step)
    del first
    gc.collect()
    step(second, torch.ones(2 * MICROBATCHES, WIDTH))
    gone = alive(parts)
    there = "Sequential" in alive(others)
    del second
    return [gone, alive(others), ["the second went too early"] * (not there)]


@pytest.mark.parametrize(("world", "static"), [("pp2", False), ("pp2", True), ("graphs", False)])
def test_models_go_one_after_another(worlds: Worlds, world: str, static: bool) -> None:
    for found in run(worlds, WORLDS[world], one_after_another, static):
        assert found == [[], [], True]


def test_models_go_that_were_asked_for_activations(worlds: Worlds) -> None:
    for found in run(worlds, WORLDS["pp2"], one_after_another, False, True):
        assert found == [[], [], True]


@pytest.mark.parametrize("world", WORLDS)
def test_of_two_models_one_goes_with_the_next_call(worlds: Worlds, world: str) -> None:
    for found in run(worlds, WORLDS[world], two_in_turn):
        assert found == [[], [], []]
