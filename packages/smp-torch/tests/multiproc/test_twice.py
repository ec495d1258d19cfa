"""Gradients that are differentiated themselves, with tensor parallelism."""

from __future__ import annotations

import pytest
import twice
from world import run, world_of

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

GIVEN = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 4}
WORLDS = {
    "tp2": world_of(2, GIVEN),
    "prescaled": world_of(2, {**GIVEN, "prescaled_batch": True}),
    "tp2-rdp2": world_of(4, GIVEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_all_are_as_of_one_process(worlds: Worlds, world: str) -> None:
    for found in run(worlds, WORLDS[world], twice.population, 0, 1, timeout=550):
        print(found["counts"])
        assert not found["told"]


def test_some_are_as_of_one_process(worlds: Worlds) -> None:
    for found in run(worlds, WORLDS["tp2"], twice.population, 3, 5):
        assert not found["told"]
