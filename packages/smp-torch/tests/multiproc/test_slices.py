"""Two slices of a batch in lockstep, beside whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import slice_cases
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


def split(degree: int, **config: Any) -> World:
    given = {"tensor_parallel_degree": degree, "ddp": True, "microbatches": 2, **config}
    return world_of(degree, given)


WORLDS = {
    "speed": split(2, optimize="speed"),
    "memory": split(2, optimize="memory", microbatches=1),
    "tp4": split(4, optimize="speed"),
}


def run_population(first: int, stride: int) -> dict[str, int]:
    return slice_cases.population(first, stride)


@pytest.mark.parametrize("world", [pytest.param(each, marks=pytest.mark.slow) for each in WORLDS])
def test_slices_give_what_whole_batches_give(worlds: Worlds, world: str) -> None:
    found = run(worlds, WORLDS[world], run_population, 0, 1, timeout=500)
    assert set(map(str, found)) == {str({"sliced": 70, "whole": 26})}


@pytest.mark.parametrize(("world", "first"), [("speed", 0), ("memory", 1)])
def test_some_slices_give_what_whole_batches_give(worlds: Worlds, world: str, first: int) -> None:
    """A stride that meets each value of each option, and each batch."""
    found = run(worlds, WORLDS[world], run_population, first, 10)
    assert len(set(map(str, found))) == 1
    assert found[0]["sliced"] > found[0]["whole"] > 0


def run_changed() -> list[str]:
    return slice_cases.changed_layers()


def test_what_users_change_runs_as_they_wrote_it(worlds: Worlds) -> None:
    assert len(run(worlds, WORLDS["speed"], run_changed)[0]) == 7


def run_case(name: str) -> None:
    getattr(slice_cases, name)()


@pytest.mark.parametrize("world", ["speed", "memory"])
@pytest.mark.parametrize("name", ["in_evaluation", "parts_of_graphs", "changed_before_backward"])
def test_outside_of_steps(worlds: Worlds, world: str, name: str) -> None:
    run(worlds, WORLDS[world], run_case, name)
