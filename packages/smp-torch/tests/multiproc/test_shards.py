"""Sharded data parallelism, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import norm_cases
import pytest
import read_cases
import shard_cases
import shard_population
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds
from smdistributed.modelparallel.torch.sharding import layout

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def sharded(ranks: int, degree: int, **config: Any) -> World:
    """Returns a world whose ranks have shards of the parameters."""
    given = {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 2}
    return world_of(ranks, {**given, "microbatches": 4, "ddp": True, **config})


LITTLE = {"sdp_max_live_parameters": 80, "sdp_reduce_bucket_size": 40}
WORLDS = {
    "sdp2": sharded(2, 2),
    "sdp2-little": sharded(2, 2, **LITTLE),
    "sdp3": sharded(3, 3, **LITTLE),
    "sdp4": sharded(4, 4, sdp_param_persistence_threshold=10),
    "sdp2-dp2": sharded(4, 2, **LITTLE),
}
COMBINED = {
    "pp2-sdp2": sharded(4, 2, pipeline_parallel_degree=2),
    "tp2-sdp2": sharded(4, 2, tensor_parallel_degree=2),
}


#: What runs by default; the rest is for releases.
QUICK = {
    "sdp2-little": tuple(name for name in shard_cases.CASES if name != "adam"),
    # By three, sums are not divided before they are complete.
    "sdp3": ("momentum_clipped",),
    "sdp2-dp2": ("momentum_clipped",),
    "pp2-sdp2": ("momentum_clipped", "sizes_are_told_of_all_parameters"),
    "tp2-sdp2": ("momentum_clipped",),
}


def is_quick(world: str, case: str) -> bool:
    return case in QUICK.get(world, ())


#: Of parameters that are exchanged by themselves, so that models of tests have some.
some_are_large = mock.patch.object(layout, "_LARGE", 16)


@some_are_large
def run_with_large(name: str) -> None:
    run_case(name)


def run_case(name: str) -> None:
    {**shard_cases.CASES, **shard_cases.HALF, **shard_cases.FP16}[name]()


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=() if is_quick(world, case) else pytest.mark.slow)
        for world in WORLDS
        for case in shard_cases.CASES
    ],
)
def test_shards(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, WORLDS[world], run_with_large, case)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=() if is_quick(world, case) else pytest.mark.slow)
        for world in COMBINED
        for case in shard_cases.COMBINED
    ],
)
def test_shards_with_other_parallelism(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, COMBINED[world], run_case, case)


@pytest.mark.parametrize("case", [*shard_cases.HALF, *shard_cases.FP16])
@pytest.mark.parametrize(
    ("kind", "degree"), [("fp16", 2), pytest.param("bf16", 4, marks=pytest.mark.slow)]
)
def test_shards_in_half_precision(worlds: Worlds, kind: str, degree: int, case: str) -> None:
    if case in shard_cases.FP16 and kind != "fp16":
        pytest.skip("without a loss scale nothing is left out")
    run(worlds, sharded(degree, degree, **{kind: True}), run_case, case)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_clipping_of_masters_where_biases_are_whole(worlds: Worlds, kind: str) -> None:
    config = {kind: True, "sdp_param_persistence_threshold": 10}
    run(worlds, sharded(2, 2, **config), run_case, "gradients_of_masters_are_clipped")


def around_a_checkpoint(path: str, resume: bool) -> list[float]:
    return shard_cases.losses_around_a_checkpoint(path, resume)


MIXED = {"microbatches": 2, "ddp": True}
LAYOUTS = {
    "sdp4": sharded(4, 4, **MIXED),
    "sdp2-dp2": sharded(4, 2, **MIXED),
    "sdp4-other-threshold": sharded(4, 4, **{**MIXED, "sdp_param_persistence_threshold": 60}),
    "pp2-sdp2": sharded(4, 2, pipeline_parallel_degree=2, **MIXED),
    "tp2-sdp2": sharded(4, 2, tensor_parallel_degree=2, **MIXED),
    "pp2-dp2": world_of(4, {"pipeline_parallel_degree": 2, **MIXED}),
    "owners": world_of(4, {"shard_optimizer_state": True, **MIXED}),
    "sdp3": sharded(3, 3, **MIXED),
    "sdp2": sharded(2, 2, **MIXED),
    "one": world_of(1, MIXED),
}
PAIRS = {("sdp4", "sdp2"), ("pp2-sdp2", "one"), ("sdp2", "sdp2")}


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
    want = run(worlds, LAYOUTS[saved], around_a_checkpoint, path, False)[0]
    for got in run(worlds, LAYOUTS[resumed], around_a_checkpoint, path, True):
        assert got == pytest.approx(want, rel=1e-5)


def merged(path: str) -> None:
    shard_cases.full_state_of(path)


def without_state(path: str) -> None:
    shard_cases.without_the_state_of_the_optimizer(path)


@pytest.mark.parametrize(
    "kind",
    [pytest.param({}, id="fp32", marks=pytest.mark.slow), pytest.param({"fp16": True}, id="fp16")],
)
@pytest.mark.parametrize("body", [merged, without_state])
def test_sharded_files(worlds: Worlds, tmp_path: Path, kind: dict[str, Any], body: Any) -> None:
    run(worlds, sharded(2, 2, **kind), body, str(tmp_path))


@some_are_large
def train_other_types() -> tuple[str, str]:
    return shard_population.trial(
        shard_population.Doubled, shard_population.plain_body, shard_population.nothing
    )


def test_numbers_of_other_types(worlds: Worlds) -> None:
    assert run(worlds, WORLDS["sdp2-little"], train_other_types)[0] == ("exact", "")


@some_are_large
def survey() -> dict[str, Any]:
    return shard_population.survey()


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sdp2", "sdp2-little"])
def test_a_population_is_exact_or_refused(worlds: Worlds, world: str) -> None:
    found = run(worlds, WORLDS[world], survey, timeout=280)[0]
    print(found)
    assert not found["wrong"]
    assert not found["refused"]
    assert sum(found["counts"].values()) == 324


def hierarchical() -> None:
    shard_cases.gathered_between_hosts()


def test_gathering_between_hosts(worlds: Worlds) -> None:
    run(worlds, COMBINED["tp2-sdp2"], hierarchical)


@some_are_large
def run_read(name: str) -> None:
    read_cases.shards(name)


#: Cases of shards that are read which run by default.
READ = {
    "sdp2-little": ("momentum_clipped", "uneven", "the_order_changes", "calls_outside_of_steps"),
    "sdp3": ("uneven",),
}


@read_cases.by_files
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=() if case in READ[world] else pytest.mark.slow)
        for world in READ
        for case in shard_cases.CASES
    ],
)
def test_shards_that_are_read(worlds: Worlds, world: str, case: str) -> None:
    run(worlds, WORLDS[world], run_read, case)


@read_cases.by_files
@pytest.mark.slow
@pytest.mark.parametrize("case", [*shard_cases.CASES, "nobody_writes", "read_less"])
def test_four_ranks_that_read(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["sdp4"], run_read_or_else, case)


def run_read_or_else(name: str) -> None:
    bodies = {
        "nobody_writes": read_cases.nobody_writes_what_others_read,
        "read_less": read_cases.ranks_may_read_less,
    }
    bodies[name]() if name in bodies else read_cases.shards(name)


@read_cases.by_files
@pytest.mark.parametrize("case", ["nobody_writes", "read_less"])
def test_when_ranks_read(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["sdp2-little"], run_read_or_else, case)


@read_cases.by_files
@pytest.mark.slow
@pytest.mark.parametrize("case", [*shard_cases.HALF, *shard_cases.FP16])
def test_half_precision_that_is_read(worlds: Worlds, case: str) -> None:
    run(worlds, sharded(2, 2, fp16=True), run_read, case)


def one_pass() -> None:
    read_cases.updated_in_one_pass()


@pytest.mark.parametrize("kind", [{"bf16": True}, pytest.param({}, marks=pytest.mark.slow)])
def test_updates_in_one_pass(worlds: Worlds, kind: dict[str, Any]) -> None:
    run(worlds, sharded(2, 2, sdp_gradient_clipping=0.05, **kind), one_pass)


@read_cases.by_files
@pytest.mark.slow
def test_a_population_that_reads_is_exact_or_refused(worlds: Worlds) -> None:
    found = run(worlds, WORLDS["sdp2-little"], read_cases.survey, timeout=280)[0]
    print(found)
    assert not found["wrong"]
    assert not found["refused"]
    assert sum(found["counts"].values()) == 324


@some_are_large
def norms() -> None:
    norm_cases.norms_are_of_what_is_used()


@some_are_large
def norms_by_memory() -> None:
    with read_cases.read():
        norm_cases.norms_are_of_what_is_used()


@pytest.mark.parametrize(
    ("ranks", "config", "case"),
    [
        pytest.param(2, {"microbatches": 1}, norms, id="sent"),
        pytest.param(
            2, {"microbatches": 1}, norms_by_memory, id="written", marks=read_cases.by_files
        ),
        pytest.param(2, {"microbatches": 4}, norms, id="microbatches"),
        pytest.param(3, {"microbatches": 1}, norms, id="three", marks=pytest.mark.slow),
        pytest.param(4, {"microbatches": 1}, norms, id="copies", marks=pytest.mark.slow),
    ],
)
def test_norms(worlds: Worlds, ranks: int, config: dict[str, Any], case: Any) -> None:
    degree = 3 if ranks == 3 else 2
    run(worlds, sharded(ranks, degree, bf16=True, sdp_gradient_clipping=0.05, **config), case)
