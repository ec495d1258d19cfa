"""Parameters that are changed after wrapping: their form, and what was put on them."""

from __future__ import annotations

import itertools

import pytest
import taken_off
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


@pytest.mark.parametrize(
    ("world", "kind", "steps"),
    quick(
        itertools.product(WORLDS, taken_off.KINDS, (0, 1)),
        {("pp2", "pruned", 1), ("pp2", "weight_norm", 1), ("owners", "pruned", 1)},
    ),
)
def test_what_was_put_on_weights_is_taken_off(
    worlds: Worlds, world: str, kind: str, steps: int
) -> None:
    run(worlds, WORLDS[world], taken_off.compare, kind, steps)
