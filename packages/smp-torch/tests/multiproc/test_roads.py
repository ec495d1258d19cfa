"""Parameters in shards, read and written past functions of torch, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import road_cases
from test_shards import COMBINED, WORLDS
from world import run

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

_PARTS = 16


def population(first: int, stride: int) -> Any:
    return road_cases.population(first, stride)


def named(roads: tuple[str, ...]) -> Any:
    return road_cases.named(roads)


#: What has ways of its own to memory.
CHOSEN = (
    *("script", "vmap", "grad", "jagged nested", "custom operation, by name", "pointer"),
    "jacobian",  # a view between steps is differentiated as a leaf
    "detached",  # which is written to
)


def test_roads_past_functions_of_torch(worlds: Worlds) -> None:
    for counts, told in run(worlds, WORLDS["sdp2-little"], named, CHOSEN):
        assert not told
        assert counts == {"exact": 26, "refused": 6}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("world", ["sdp2", "sdp2-little"])
def test_a_population_of_roads(worlds: Worlds, world: str, part: int) -> None:
    for counts, told in run(worlds, WORLDS[world], population, part, _PARTS, timeout=550):
        print(counts)
        assert not told


@pytest.mark.slow
def test_roads_of_slices_in_shards(worlds: Worlds) -> None:
    for _, told in run(worlds, COMBINED["tp2-sdp2"], named, CHOSEN, timeout=300):
        assert not told


@pytest.mark.slow
def test_roads_in_a_compiled_language(worlds: Worlds) -> None:
    for _, told in run(worlds, WORLDS["sdp2"], extension, timeout=550):
        assert not told


def extension() -> Any:
    return road_cases.by_extension()
