"""Every operation of a model runs on one rank, and its variables take memory there alone."""

from __future__ import annotations

import functools

import pytest
from tf_execution import (
    LAYERS,
    MICROBATCHES,
    NAMES,
    STEPS,
    Executed,
    build,
    execute,
    peak_with_variable,
)

from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
LARGE_BYTES = 2**30
BOUND_BYTES = 100 * 2**20


@functools.cache
def executed() -> tuple[Executed, ...]:
    return run_ranks(2, execute, timeout=150, env=QUIET).results


@pytest.mark.parametrize("name", NAMES)
def test_each_operation_is_executed_by_one_rank(name: str) -> None:
    whole = executed()[0].whole[name]
    assert len(whole) > 10
    assert len(set(whole)) == len(whole)
    own = [rank.own[name] for rank in executed()]
    assert sorted(own[0] + own[1]) == sorted(whole)
    assert all(own)


def test_each_layer_is_computed_once_a_microbatch_on_one_rank() -> None:
    counts = [rank.counts for rank in executed()]
    assert sorted([*counts[0], *counts[1]]) == list(range(LAYERS))
    assert all(counts)
    for rank in counts:
        assert set(rank.values()) == {STEPS * MICROBATCHES}


def test_a_variable_takes_memory_on_its_own_rank_alone() -> None:
    tiny, large = (
        run_ranks(2, peak_with_variable, timeout=90, env=QUIET, args=[size]).results
        for size in (32, LARGE_BYTES)
    )
    more = [of_large - of_tiny for of_tiny, of_large in zip(tiny, large, strict=True)]
    print(f"a variable of {LARGE_BYTES} bytes on rank 1 takes {more} bytes by rank")
    assert more[1] > 0.9 * LARGE_BYTES
    assert more[0] < BOUND_BYTES


def test_long_building_shows_on_one_rank_what_it_is_at() -> None:
    first, second = run_ranks(2, build, timeout=90, env=QUIET).results
    assert second == ""
    assert "building the graph of step compute" in first
    assert "the operations of transformer and their gradients" in first
    assert f"microbatch {MICROBATCHES} of {MICROBATCHES}" in first
