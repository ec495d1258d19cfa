"""Random numbers are those of one process, wherever a model draws them, or refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tf_random
from tf_worlds import MICROBATCHES, ONE, TWO_BY_HAND, world

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

REPLICAS = world(
    4,
    pipeline_parallel_degree=2,
    auto_partition=False,
    default_partition=0,
    microbatches=MICROBATCHES // 2,  # of the same examples as without replicas
)
#: Each kind of place, and draws of each kind.
FEW = [
    *(("normal", place) for place in ("loop", "condition of a loop", "branch", "deep")),
    *((draw, "map_fn") for draw in ("gamma of each", "categories", "shuffle")),
    ("dropout", "recompute_grad"),
]


def assert_same(
    worlds: Worlds, ways: World, pairs: Sequence[tuple[str, str]], seed: int | None
) -> None:
    """Asserts that a world draws what one process does, and other numbers in each step."""
    (one,) = worlds.run(ONE, tf_random.drawn, pairs, seed, timeout=200)
    names = [*pairs[::2], *pairs[1::2]]
    for found in worlds.run(ways, tf_random.drawn, pairs, seed, timeout=200):
        for own, expected in zip(found, one, strict=True):
            for name, values, others in zip(names, own, expected, strict=True):
                np.testing.assert_allclose(values, others, 1e-5, 1e-5, err_msg=str(name))
    for name, first, second in zip(names, *one, strict=True):
        if name[0] != "without state" and name[1] != "condition of a loop":
            assert not np.allclose(first, second), f"{name} draws the same in each step"


def test_partitions_draw_what_one_process_does(worlds: Worlds) -> None:
    assert_same(worlds, TWO_BY_HAND, FEW, None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("ways", [TWO_BY_HAND, REPLICAS], ids=["partitions", "replicas"])
@pytest.mark.parametrize("draw", tf_random.DRAWS)
def test_every_draw_in_every_place(
    worlds: Worlds, draw: str, ways: World, seed: int | None
) -> None:
    assert_same(worlds, ways, tf_random.pairs_of(draw), seed)


def test_turns_and_calls_draw_other_numbers(worlds: Worlds) -> None:
    worlds.run(TWO_BY_HAND, tf_random.turns)


def test_the_body_of_a_step_draws_the_same_everywhere(worlds: Worlds) -> None:
    first, second = worlds.run(TWO_BY_HAND, tf_random.in_the_body, "top level")
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "place", ["loop", *(pytest.param(p, marks=pytest.mark.slow) for p in ("function", "map_fn"))]
)
def test_the_body_gives_seeds_to_functions_itself(worlds: Worlds, place: str) -> None:
    worlds.run(TWO_BY_HAND, tf_random.in_a_function_of_the_body, place)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name, place, marks=() if (name, place) == ("candidates", "loop") else pytest.mark.slow
        )
        for name in tf_random.REFUSED
        for place in ("top level", "loop", "function")
    ],
)
def test_what_cannot_be_the_same_is_refused(worlds: Worlds, name: str, place: str) -> None:
    worlds.run(TWO_BY_HAND, tf_random.refused, name, place)
