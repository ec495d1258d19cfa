"""Activations in host memory, in real processes."""

from __future__ import annotations

import offload_cases
import pytest
from world import pipeline, run, world_of

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

SLICES = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2, "optimize": "speed"}
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 2}
LITTLE = {"sdp_max_live_parameters": 80, "sdp_reduce_bucket_size": 40}
#: Those of other files, so that none is started for these alone.
WORLDS = {
    "one": pipeline(1),
    "pp2": pipeline(2),
    "pp3": pipeline(3, launcher="fork"),
    "tp2": world_of(2, SLICES),
    "pp2-tp2": world_of(4, {**SLICES, "pipeline_parallel_degree": 2}),
    "pp2-fp16": world_of(
        2, {"fp16": True, "microbatches": 4, "ddp": True, "pipeline_parallel_degree": 2}
    ),
    "sdp2": world_of(2, {**SHARDS, **LITTLE, "microbatches": 2, "ddp": True}),  # gathers often
    "pp2-sdp2": world_of(
        4, {**SHARDS, "microbatches": 4, "ddp": True, "pipeline_parallel_degree": 2}
    ),
}
#: What runs by default; the rest is for releases.
QUICK = {
    "one": tuple(offload_cases.CASES),
    "pp2": ("all_forward_passes_first",),
    "tp2": ("a_sequence",),
    "sdp2": ("regions_in_glue",),
}


def run_case(name: str) -> None:
    offload_cases.CASES[name]()


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=() if case in QUICK.get(world, ()) else pytest.mark.slow)
        for world in WORLDS
        for case in (offload_cases.CASES if world == "one" else offload_cases.EVERYWHERE)
    ],
)
def test_offloading(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, WORLDS[world], run_case, case)
