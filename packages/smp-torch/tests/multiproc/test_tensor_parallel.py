"""Tensor parallelism, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_cases
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def split(degree: int, ranks: int | None = None, **config: Any) -> World:
    """Returns a world that splits modules over ``degree`` ranks."""
    given = {
        "tensor_parallel_degree": degree,
        "microbatches": tensor_cases.MICROBATCHES,
        "ddp": True,
        "optimize": "speed",
        **config,
    }
    return world_of(ranks or degree, given)


WORLDS = {
    "tp2": split(2),
    "tp2-memory": split(2, optimize="memory"),
    "tp2-prescaled": split(2, prescaled_batch=True),
    "tp2-dp2": split(2, 4),
    "tp4": split(4),
}
#: What the other worlds run of the models that the first runs all.
FEW = {
    "tp2-memory": ("gpt2", "cross"),
    "tp2-prescaled": ("gpt2", "linear", "embedding"),
    "tp2-dp2": ("gpt2",),
    "tp4": (),
}


def run_equality(name: str) -> None:
    tensor_cases.EQUALITY[name]()


def run_behaviour(name: str) -> None:
    tensor_cases.BEHAVIOUR[name]()


@pytest.mark.parametrize(
    ("world", "model"),
    [
        pytest.param(
            world, model, marks=() if model in FEW.get(world, (model,)) else pytest.mark.slow
        )
        for world in WORLDS
        for model in tensor_cases.MODELS
    ],
)
def test_training_is_that_of_one_process(worlds: Worlds, world: str, model: str) -> None:
    run(worlds, WORLDS[world], run_equality, model)


@pytest.mark.parametrize("case", tensor_cases.BEHAVIOUR)
def test_behaviour(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["tp2"], run_behaviour, case)


def losses_with_dropout() -> list[float]:
    return tensor_cases.dropout_losses()


@pytest.mark.parametrize("world", ["tp2", pytest.param("tp4", marks=pytest.mark.slow)])
def test_dropout_is_that_of_one_process(worlds: Worlds, world: str) -> None:
    size = WORLDS[world].num_ranks
    one = world_of(1, {"microbatches": tensor_cases.MICROBATCHES * size, "ddp": True})
    (want,) = run(worlds, one, losses_with_dropout)
    for got in run(worlds, WORLDS[world], losses_with_dropout):
        assert got == pytest.approx(want, rel=2e-6)
    assert len(set(want)) == len(want)
