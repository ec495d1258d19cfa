"""What a rank keeps in memory, and that it does not change the numbers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import checkpointing_cases
import memory_cases
import pytest
import torch
from world import pipeline, quick, replicas, run, run_fresh, world_of

from smdistributed.modelparallel.common.testing import World, Worlds
from smdistributed.modelparallel.common.testing.run_ranks import RanksFailedError

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]


SHARDS = world_of(
    2,
    {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
        "microbatches": 4,
    },
)


def run_checkpointing(case: str) -> Any:
    return checkpointing_cases.cases()[case]()


#: What every run tries, by the number of partitions: each strategy in one form.
FEW = {
    1: ("functions_in_glue", "a_region_over_all_partitions", "native_sequential"),
    2: checkpointing_cases.cases().keys() - {"strategies_of_the_other_form"},
    3: (),
}


@pytest.mark.parametrize(
    ("degree", "case"),
    [
        pytest.param(degree, case, marks=() if case in FEW[degree] else pytest.mark.slow)
        for degree in (1, 2, 3)
        for case in checkpointing_cases.cases()
    ],
)
def test_checkpointing_keeps_the_numbers_and_less_memory(
    worlds: Worlds, degree: int, case: str
) -> None:
    if case == "transformers":
        pytest.importorskip("transformers")
    world = pipeline(degree, launcher="smprun-fork" if degree == 2 else "fork")
    run(worlds, world, run_checkpointing, case, timeout=150)


def test_a_delayed_model_takes_the_memory_of_its_share() -> None:
    layers, width = 40, 1024
    tiny, large = (
        run_fresh(2, memory_cases.delayed_model, 2, size, layers, timeout=150)
        for size in (8, width)
    )
    for without, rank in zip(tiny, large, strict=True):
        assert rank["is_exact"]
        assert without["is_exact"]
        assert 0.4 < rank["own"] / rank["total"] < 0.6
        assert rank["peak"] - without["peak"] < rank["own"] + 40 * 2**20, (rank, without)


@pytest.mark.parametrize("degree", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_delayed_model_trains_saves_and_resumes_like_any_other(
    degree: int, tmp_path: Path
) -> None:
    ranks = run_fresh(degree, memory_cases.delayed_training, degree, str(tmp_path), timeout=100)
    for found in ranks:
        assert found["delayed"] == found["immediate"]
        assert found["resumed"] == found["immediate"][2:]
        for name in ("delayed state", "resumed state"):
            assert found[name].keys() == found["immediate state"].keys()
            for key, expected in found["immediate state"].items():
                assert torch.equal(found[name][key], expected), (name, key)


@functools.cache
def training(active_microbatches: int) -> Any:
    return run_fresh(2, memory_cases.training, 2, active_microbatches, timeout=150)


def test_a_rank_holds_nothing_of_the_others_after_training() -> None:
    ranks = training(2)
    assert sum(rank["own"] for rank in ranks) > 100_000
    for rank in ranks:
        # Parameters, gradients and two moments of Adam.
        assert 3.9 * rank["own"] < rank["live"] < 4.5 * rank["own"], ranks


def test_kept_activations_are_bounded_by_active_microbatches() -> None:
    one, two, four = (training(active)[0]["kept"] for active in (1, 2, 4))
    assert one > 0
    assert two <= 2 * one
    assert four <= 4 * one
    # The first rank of two is at most one microbatch ahead of the last: more does not help it.
    assert one < two


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("pipeline", pipeline(2, launcher="fork")),
        ("replicas", replicas(2, 1)),
        ("shards", SHARDS),
        ("owners", replicas(2, 1, shard_optimizer_state=True, bf16=True)),
    ],
)
def test_what_training_needs_is_known_before_it(worlds: Worlds, kind: str, world: World) -> None:
    ranks = run(worlds, world, memory_cases.foreseen)
    for rank in ranks:
        for name, (expected, found) in rank.items():
            if kind == "owners" and name == "gradients":
                assert found < expected  # during a step a rank has those of others, too
            else:
                assert found == pytest.approx(expected, rel=0.03), (kind, name)
    # Five of six layers train, each with 256 * 257 numbers.
    whole = 5 * 256 * 257 * 4
    numbers = {"pipeline": (2, 1), "replicas": (4, 2), "shards": (2, 1), "owners": (3, None)}
    of_state, of_gradients = numbers[kind]
    assert sum(rank["optimizer"][1] for rank in ranks) == pytest.approx(of_state * whole, rel=0.01)
    if of_gradients:
        # Replicas have buckets besides.
        copies = 2 if kind == "replicas" else 1
        gradients = sum(rank["gradients"][1] for rank in ranks)
        assert gradients == pytest.approx(copies * of_gradients * whole, rel=0.01)


@pytest.mark.parametrize(
    "world", [pipeline(2, 8, launcher="fork"), pipeline(1, 8)], ids=["pipeline", "alone"]
)
def test_what_passes_hold_is_known_before_them(worlds: Worlds, world: World) -> None:
    for rank in run(worlds, world, memory_cases.foreseen_passes):
        assert rank["taken"] > 2**20
        assert 0.97 < rank["expected"] / rank["taken"] < 1.05, rank


@pytest.mark.parametrize("kind", quick(["pipeline", "alone"], ["pipeline"]))
def test_a_rank_without_memory_says_where_it_is(kind: str) -> None:
    num_ranks = 2 if kind == "pipeline" else 1
    with pytest.raises(RanksFailedError) as failed:
        run_fresh(num_ranks, memory_cases.out_of_memory, kind, launcher="smprun-fork", timeout=100)
    told = failed.value.outcome.stderr
    assert "can't allocate memory" in told
    assert told.count(f"memory of rank {num_ranks - 1} on") == 1
    assert "What frees memory on this rank:" in told


@pytest.mark.slow
def test_a_model_too_large_for_a_process_trains_on_four() -> None:
    width, layers = 1024, 32
    whole = 16 * layers * width**2
    budget = whole // 2
    (one,) = run_fresh(1, memory_cases.limited_training, 1, width, layers, budget, timeout=150)
    assert "allocate" in one["error"]
    four = run_fresh(4, memory_cases.limited_training, 4, width, layers, budget, timeout=150)
    for rank in four:
        assert "error" not in rank, rank
        # Weights, gradients, two moments; what is gathered; a bucket as it is made, sent, received.
        plan = whole / 4 + 4 * (rank["gathered"] + 3 * rank["bucket"])
        print(f"peak {rank['taken'] / 2**20:.1f} MiB, plan {plan / 2**20:.1f} MiB")
        assert 0.9 < rank["taken"] / plan < 1.1, (rank, plan)
