"""Ways to differentiate in steps with one partition, in real processes."""

from __future__ import annotations

from typing import Any

import differentiating
import pytest
from test_owners import WORLDS as OWNERS
from test_shards import WORLDS as SHARDS
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

GIVEN = {"microbatches": differentiating.MICROBATCHES, "ddp": True}
WORLDS: dict[str, World] = {
    "one": world_of(1, GIVEN),
    "owners": OWNERS["dp2"],
    "shards": SHARDS["sdp2-little"],
    "dp2": world_of(2, GIVEN),
    "bf16": world_of(2, {**GIVEN, "bf16": True}),
    "fp16": world_of(2, {**GIVEN, "fp16": True}),
}
#: Whose gradients are of one microbatch, or are to be differentiated again.
REFUSED = {"graph", "set by hand", "set by a transform"}


def population(num_models: int) -> Any:
    return differentiating.population(num_models=num_models)


@pytest.mark.parametrize(
    ("world", "num_models"),
    [
        ("one", 1),
        *(
            pytest.param(world, number, marks=pytest.mark.slow)
            for world in WORLDS
            for number in (1, 2)
            if (world, number) != ("one", 1)
        ),
    ],
)
def test_ways_are_exact_or_refused(worlds: Worlds, world: str, num_models: int) -> None:
    for found in run(worlds, WORLDS[world], population, num_models):
        if (world, num_models) == ("fp16", 2):
            # Each has a loss scale of its own, and a loss names no model.
            assert set(found["told"]) > REFUSED
        else:
            assert set(found["told"]) == REFUSED
        assert {end for end, _ in found["told"].values()} == {"refused"}


def chosen() -> Any:
    return differentiating.population(["loss", "penalty", "set by hand"])


@pytest.mark.parametrize("world", ["owners", "shards"])
def test_a_loss_that_is_differentiated_by_itself(worlds: Worlds, world: str) -> None:
    for found in run(worlds, WORLDS[world], chosen):
        assert found["counts"] == {"exact": 2, "refused": 1}
