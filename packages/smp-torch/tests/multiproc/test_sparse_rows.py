"""Sparse gradients of replicas, of shards, and of those that update for each other."""

from __future__ import annotations

import pytest
import sparse_rows
from test_owners import WORLDS as OWNERS
from test_shards import WORLDS as SHARDS
from test_updates import WORLDS as OTHERS
from world import run

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

WORLDS: dict[str, World] = {
    "dp2": OTHERS["dp2"],
    "shards": SHARDS["sdp2-little"],
    "owners": OWNERS["dp2"],
    "pp2-owners": OWNERS["pp2-dp2"],
    "sdp2-dp2": SHARDS["sdp2-dp2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_all_rows_are_known(worlds: Worlds, world: str) -> None:
    for found in run(worlds, WORLDS[world], sparse_rows.population, 0, 1, timeout=550):
        print(found["counts"])
        for way, (end, said) in found["told"].items():
            assert end == "refused", (way, end, said)
            # Shards are used in the same order by all ranks; owners update by what is wrapped.
            assert "in the same order" in said or "owners" in world, (way, said)


@pytest.mark.parametrize(("world", "part"), [("dp2", 3), ("shards", 0)])
def test_some_rows_are_known(worlds: Worlds, world: str, part: int) -> None:
    for found in run(worlds, WORLDS[world], sparse_rows.population, part, 11):
        assert not [each for each in found["told"].values() if "in the same order" not in each[1]]
        assert found["counts"]["exact"] > 4
