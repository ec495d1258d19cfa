"""Ways to update parameters where a rank has a part of them, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import updates
from test_owners import WORLDS as OWNERS
from test_shards import WORLDS as SHARDS
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

GIVEN = {"microbatches": 4, "ddp": True}
WORLDS: dict[str, World] = {
    "dp2": world_of(2, GIVEN),
    "owners": OWNERS["dp2"],
    "pp2-owners": OWNERS["pp2-dp2"],
    "shards": SHARDS["sdp2-little"],
    "slices": world_of(2, {**GIVEN, "tensor_parallel_degree": 2}),
    "pp2": world_of(2, {**GIVEN, "pipeline_parallel_degree": 2}),
    "bf16": world_of(2, {**GIVEN, "bf16": True}),
    "fp16": world_of(2, {**GIVEN, "fp16": True}),
}
#: In half precision rounding decides the signs that they go by.
BY_SIGNS = ("RMSprop", "Rprop", "signs", "by hand, signs")
PARTS = 4


def population(part: int, is_half: bool) -> Any:
    names = [each for each in updates.WAYS if not (is_half and each in BY_SIGNS)]
    return updates.population(names[part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", WORLDS)
def test_ways_are_exact_or_refused(worlds: Worlds, world: str, part: int) -> None:
    is_half = world in ("bf16", "fp16")
    everyones = run(worlds, WORLDS[world], population, part, is_half, timeout=550)
    for found in everyones:
        print(found["counts"])
        assert not [each for each in found["told"].items() if each[1][0] != "refused"]
        assert found["told"].keys() == everyones[0]["told"].keys()  # on every rank


def chosen() -> Any:
    return updates.population(["SGD", "total norm", "norms", "by hand, alpha"])


def test_who_updates_what_a_rank_has_not(worlds: Worlds) -> None:
    for found in run(worlds, WORLDS["owners"], chosen):
        assert found["counts"] == {"exact": 2, "refused": 6}
        assert found["told"]["SGD, plain"][1].endswith("call the step of what that returns.")


def whole() -> Any:
    """What looks at whole parameters; of some, what is wrapped alone."""
    found = updates.population(["norms", "LBFGS", "Adagrad"])
    for name in ("assigning", "sharp", "sharp, in two calls"):
        found["told"][name] = updates.outcome(name, is_wrapped=True)
    return found


@pytest.mark.parametrize("world", ["shards", "slices"])
def test_parts_are_whole_for_who_asks(worlds: Worlds, world: str) -> None:
    for found in run(worlds, WORLDS[world], whole):
        assert found["counts"] == {"exact": 6}
        assert set(found["told"].values()) == {("exact", "")}
