"""What is recorded, reduced and captured of parameters goes by the form that they have."""

from __future__ import annotations

import itertools

import pytest
from reformed import MOMENTS, WAYS, compare
from world import manual_pipeline, quick, replicas, run, world_of

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WORLDS = {
    "one": world_of(1, {"microbatches": 2, "ddp": True}),
    "pp2": manual_pipeline(2, microbatches=2),
    "dp2": replicas(2, 1, microbatches=2),
    "tp2": world_of(2, {"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2}),
    "owners": replicas(2, 1, microbatches=2, shard_optimizer_state=True),
    "pp2-owners": replicas(
        2, 2, 2, shard_optimizer_state=True, auto_partition=False, default_partition=0
    ),
}
CASES = list(itertools.product(WORLDS, WAYS, MOMENTS))
QUICK = {
    *(("pp2", way, moment) for way in ("half", "grown") for moment in ("before", "after_two")),
    ("owners", "shrunk", "after_one"),
}


@pytest.mark.parametrize(("world", "way", "moment"), quick(CASES, QUICK))
def test_parameters_may_get_another_form(worlds: Worlds, world: str, way: str, moment: str) -> None:
    run(worlds, WORLDS[world], compare, way, moment)
