"""Every layer of a model runs on one rank, and its variables take memory there alone."""

from __future__ import annotations

import pytest
from tf_beside import assert_same
from tf_execution import (
    LARGE_ROWS,
    LAYERS,
    STEPS,
    build,
    execute,
    held_up,
    large,
    memory_of_variable,
    num_laid,
    python_with_gradients,
    shapes,
    trace_and_drop,
    transfers_before_checks,
)
from tf_worlds import MICROBATCHES, PRELOAD, QUIET, TWO, TWO_BY_HAND, launcher_of

from smdistributed.modelparallel.common.testing import Worlds, run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

LARGE_BYTES = 2**30
BOUND_BYTES = 100 * 2**20


def test_each_layer_is_computed_once_a_microbatch_on_one_rank(worlds: Worlds) -> None:
    counts = worlds.run(TWO, execute)
    assert sorted([*counts[0], *counts[1]]) == list(range(LAYERS))
    assert all(counts)
    for rank in counts:
        assert set(rank.values()) == {STEPS * MICROBATCHES}


def test_python_in_one_partition_has_its_own_gradients() -> None:
    run_ranks(
        1,
        python_with_gradients,
        launcher=launcher_of(1),
        timeout=100,
        env=QUIET,
        preload=PRELOAD,
    )


def test_a_step_is_traced_once_and_leaves_nothing_behind(worlds: Worlds) -> None:
    for num_bodies, is_left in worlds.run(TWO, trace_and_drop):
        assert num_bodies == MICROBATCHES
        assert not is_left


def test_a_rank_that_waits_for_a_transfer_says_for_whom(worlds: Worlds) -> None:
    first, _ = worlds.run(TWO, held_up, 0.2)
    assert "transfers with rank 1" in first


def test_new_shapes_leave_nothing_behind(worlds: Worlds) -> None:
    for ways in worlds.run(TWO, shapes):
        for before, after in ways:
            assert after == before > 0, ways


def test_no_transfer_starts_before_a_batch_of_unknown_size_is_checked(worlds: Worlds) -> None:
    """What waits for another process when a check fails goes on waiting until its time is up."""
    for count, early in worlds.run(TWO, transfers_before_checks):
        assert count > 0
        assert not early


@pytest.mark.parametrize("rows", [MICROBATCHES * LARGE_ROWS, None])
def test_what_is_large_goes_through_mailboxes(worlds: Worlds, rows: int | None) -> None:
    assert_same(worlds, large, rows, world=TWO_BY_HAND)
    assert all(worlds.run(TWO_BY_HAND, num_laid))


def test_long_building_shows_on_one_rank_what_it_is_at(worlds: Worlds) -> None:
    first, second = worlds.run(TWO, build)
    assert second == ""
    assert "building the graph of step compute" in first
    assert "the operations of transformer and their gradients" in first
    assert f"microbatch {MICROBATCHES} of {MICROBATCHES}" in first


def test_a_variable_takes_memory_on_its_own_rank_alone(worlds: Worlds) -> None:
    first, second = worlds.run(TWO_BY_HAND, memory_of_variable, LARGE_BYTES)
    print(f"a variable of {LARGE_BYTES} bytes on rank 1, before and after: {first}, {second}")
    assert second[1].present - second[0].present > 0.9 * LARGE_BYTES
    # Also while it was made: it would not fit into what was used and given back before.
    assert first[0].peak - first[0].present < LARGE_BYTES - BOUND_BYTES
    assert first[1].peak - first[0].peak < BOUND_BYTES
