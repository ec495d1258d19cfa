"""Habits of training loops, in real processes."""

from __future__ import annotations

from typing import Any

import drawn_between
import habits
import pytest
from test_equality import WORLDS as PIPELINES
from test_owners import WORLDS as OWNERS
from test_shards import WORLDS as SHARDS
from test_slices import WORLDS as SLICES
from world import quick, run

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WORLDS: dict[str, World] = {
    **{name: PIPELINES[name] for name in ("one", "pp2-copies", "pp2-simple", "pp4")},
    **{name: PIPELINES[name] for name in ("pp2-halves", "pp2-v", "pp2-dp2")},
    "owners": OWNERS["dp2"],
    "shards": SHARDS["sdp2-little"],
    "slices": SLICES["speed"],
}
#: Ranks that compute together need as many microbatches.
TOGETHER = ("shards", "slices")


def small_batches(*given: Any) -> dict[str, Any]:
    return habits.small_batches(*given)


def several_passes(*given: Any) -> dict[str, Any]:
    return habits.several_passes(*given)


def withheld(*given: Any) -> dict[str, Any]:
    return habits.withheld(*given)


def withheld_gradients_are_own() -> None:
    habits.withheld_gradients_are_own()


def told_of_misfits() -> list[str]:
    return habits.told_of_misfits()


def different_numbers() -> str:
    return habits.different_numbers()


def drawn(*given: Any) -> list[str]:
    return drawn_between.drawn_between(*given)


def lazy_layers() -> list[str]:
    return drawn_between.lazy_layers()


def has_partitions(world: str) -> bool:
    """Whether a world has several partitions."""
    return world.startswith("pp")


def is_exact(worlds: Worlds, world: str, population: Any, *given: Any) -> None:
    """Runs a population, of which all must be exact on all ranks."""
    for found in run(worlds, WORLDS[world], population, *given):
        assert set(found["counts"]) == {"exact"}, found["told"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_what_scripts_draw_between_steps(worlds: Worlds, world: str) -> None:
    assert not any(run(worlds, WORLDS[world], drawn))


def test_lazy_layers_draw_what_they_draw_in_one_process(worlds: Worlds) -> None:
    assert not any(run(worlds, WORLDS["pp2-copies"], lazy_layers))


@pytest.mark.parametrize("world", ["one", "pp2-copies"])
def test_some_that_scripts_draw_between_steps(worlds: Worlds, world: str) -> None:
    assert not any(run(worlds, WORLDS[world], drawn, drawn_between.SOME))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_small_batches(worlds: Worlds, world: str) -> None:
    is_exact(worlds, world, small_batches)


@pytest.mark.parametrize(("world", "first"), [("one", 3), ("pp2-copies", 0)])
def test_some_small_batches(worlds: Worlds, world: str, first: int) -> None:
    """A stride that meets each size, and each body in one of the worlds."""
    is_exact(worlds, world, small_batches, first, 13)


@pytest.mark.parametrize("world", [pytest.param(each, marks=pytest.mark.slow) for each in TOGETHER])
def test_ranks_that_compute_together_need_as_many_microbatches(worlds: Worlds, world: str) -> None:
    for told in run(worlds, WORLDS[world], different_numbers):
        assert told.startswith("refused: ")
        assert "rank 1" in told


@pytest.mark.parametrize("world", quick(WORLDS, ["one", "pp2-copies"]))
def test_several_backward_passes(worlds: Worlds, world: str) -> None:
    is_exact(worlds, world, several_passes, ("last",))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_sync(worlds: Worlds, world: str) -> None:
    is_exact(worlds, world, withheld)


@pytest.mark.parametrize("world", ["owners", "shards"])
def test_some_no_sync(worlds: Worlds, world: str) -> None:
    """A stride that meets each option."""
    is_exact(worlds, world, withheld, 0, 9)


def test_gradients_are_withheld(worlds: Worlds) -> None:
    run(worlds, WORLDS["owners"], withheld_gradients_are_own)


@pytest.mark.parametrize("world", ["one", "pp2-copies"])
def test_arguments_that_are_no_batch_are_named(worlds: Worlds, world: str) -> None:
    for told in run(worlds, WORLDS[world], told_of_misfits):
        assert "name mask in non_split_inputs" in told[0]
        assert "mask of shape (8, 8)" in told[0]
        assert all("order of shape (8,)" in each for each in told[1:])
        assert len(told) == (1 if has_partitions(world) else 2)
