"""After many steps a process holds what it held after the first ones."""

from __future__ import annotations

from typing import Any

import long_runs
import pytest
from world import pipeline, replicas, run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def two(**config: Any) -> World:
    return world_of(2, {"microbatches": 4, "ddp": True, **config})


#: Those of other files, which are started for these as well.
WORLDS = {
    "pipeline": pipeline(2),
    "replicas": replicas(2, 1),
    "slices": two(tensor_parallel_degree=2, microbatches=2, optimize="speed"),
    "shards": two(
        sharded_data_parallel_degree=2,
        microbatches=2,
        sdp_param_persistence_threshold=2,
        sdp_max_live_parameters=80,
        sdp_reduce_bucket_size=40,
    ),
    "owners": two(shard_optimizer_state=True),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("num_first", "num_steps"), [(70, 100), pytest.param(100, 1000, marks=pytest.mark.slow)]
)
def test_a_long_run_holds_no_more_than_a_short_one(
    worlds: Worlds, world: str, num_first: int, num_steps: int
) -> None:
    run(worlds, WORLDS[world], long_runs.train, num_first, num_steps)


def test_questions_about_activations_leave_nothing(worlds: Worlds) -> None:
    for first, later in run(worlds, WORLDS["pipeline"], long_runs.ask, 12, 20):
        assert later <= first
