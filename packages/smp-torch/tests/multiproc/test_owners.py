"""Sharded optimizer state, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import half_cases
import owner_cases
import pytest
import tensor_cases
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def sharded(ranks: int, **config: Any) -> World:
    """Returns a world whose ranks share the optimizer state."""
    return world_of(
        ranks, {"shard_optimizer_state": True, "microbatches": 4, "ddp": True, **config}
    )


def tensor(ranks: int, **config: Any) -> World:
    """Returns a world that splits modules over two ranks."""
    given = {"tensor_parallel_degree": 2, "microbatches": 2, "ddp": True, "optimize": "speed"}
    return world_of(ranks, {**given, **config})


WORLDS = {
    "dp2": sharded(2),
    "dp4": sharded(4),
    "pp2-dp2": sharded(4, pipeline_parallel_degree=2),
}
HALF = {
    "dp2-fp16": sharded(2, fp16=True),
    "pp2-dp2-fp16": sharded(4, fp16=True, pipeline_parallel_degree=2),
    "pp2-dp2-bf16": sharded(4, bf16=True, pipeline_parallel_degree=2),
}
#: What runs by default; the rest is for releases.
QUICK = {
    "dp2": tuple(name for name in owner_cases.CASES if name != "adam"),
    "pp2-dp2": ("momentum_clipped",),
}


def run_case(name: str) -> None:
    owner_cases.CASES[name]()


def run_half(name: str) -> None:
    {**half_cases.BIT_FOR_BIT, **half_cases.FP16, **half_cases.BOTH}[name]()


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=() if case in QUICK.get(world, ()) else pytest.mark.slow)
        for world in WORLDS
        for case in owner_cases.CASES
    ],
)
def test_sharded_state(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, WORLDS[world], run_case, case)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=pytest.mark.slow)
        for world in HALF
        for case in (
            *("adam", "clipped", "a_changed_parameter_counts"),
            *(("overflow_on_one_rank",) if world.endswith("fp16") else ()),
        )
    ],
)
def test_sharded_state_in_half_precision(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, HALF[world], run_half, case)


@pytest.mark.parametrize(
    "world",
    [
        HALF["pp2-dp2-bf16"],
        # Owners of what is in no slice are among the ranks of both replicas.
        tensor(4, bf16=True, shard_optimizer_state=True),
        pytest.param(HALF["pp2-dp2-fp16"], marks=pytest.mark.slow),
    ],
)
def test_masters_and_shards_of_all_ranks_come_back(worlds: Worlds, world: World) -> None:
    run(worlds, world, run_half, "state_goes_on")


def losses_around_a_checkpoint(path: str, resume: bool) -> list[float]:
    return tensor_cases.saved_losses(path, resume=resume)


LAYOUTS = {
    "sharded": world_of(4, {"microbatches": 2, "ddp": True, "shard_optimizer_state": True}),
    "tp2-sharded": tensor(4, shard_optimizer_state=True),
    "pp2-tp2-sharded": tensor(8, shard_optimizer_state=True, pipeline_parallel_degree=2),
    "pp2-sharded": sharded(4, pipeline_parallel_degree=2, microbatches=2),
    "tp2": tensor(2),
    "one": world_of(1, {"microbatches": 8, "ddp": True}),
}
PAIRS = {("tp2-sharded", "one")}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(one, other, marks=() if (one, other) in PAIRS else pytest.mark.slow)
        for one in LAYOUTS
        for other in LAYOUTS
    ],
)
def test_checkpoints_fit_any_layout(
    worlds: Worlds, tmp_path: Path, saved: str, resumed: str
) -> None:
    path = str(tmp_path)
    want = run(worlds, LAYOUTS[saved], losses_around_a_checkpoint, path, False)[0]
    for got in run(worlds, LAYOUTS[resumed], losses_around_a_checkpoint, path, True):
        assert got == pytest.approx(want, rel=1e-5)
