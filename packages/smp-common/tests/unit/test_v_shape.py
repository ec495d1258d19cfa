from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdistributed.modelparallel.common.planning.v_shape import VProblem


def problem(
    loads: Sequence[int], num_ranks: int, avoided: Sequence[int] = (), delay: int = 0
) -> VProblem:
    is_avoided = [place in avoided for place in range(len(loads))]
    return VProblem(loads, is_avoided, [0] * len(loads), num_ranks, delay)


def dealt(one: VProblem) -> list[int]:
    """The rank of every item."""
    ranks = [0] * len(one.loads)
    for rank, (begin, end) in enumerate(one.cuts()):
        ranks[begin:end] = [rank] * (end - begin)
    return ranks


@pytest.mark.parametrize(
    ("num_items", "expected"),
    [
        (6, [0, 1, 2, 2, 1, 0]),
        (5, [0, 1, 2, 1, 0]),
        (12, [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]),
        (9, [0, 0, 1, 2, 2, 2, 1, 1, 0]),
    ],
)
def test_equal_items_go_up_the_ranks_and_come_back(num_items: int, expected: list[int]) -> None:
    found = dealt(problem([1] * num_items, 3))
    assert [found.count(rank) for rank in range(3)] == [expected.count(rank) for rank in range(3)]
    pieces = [rank for rank, _ in itertools.groupby(found)]
    assert pieces == [0, 1, 2, 1, 0]
    if num_items % 6 == 0:
        assert found == expected


def test_two_pieces_of_a_rank_count_together() -> None:
    # Cut into six even pieces, the ends would have 3 and 3, and the middle 2.
    assert dealt(problem([3, 1, 1, 1, 1, 1, 1, 1], 2)) == [0, 1, 1, 1, 1, 1, 0, 0]


def test_what_is_heavy_leaves_its_rank_nothing_else() -> None:
    # From inside out alone, the last rank would have one and the one before it six.
    found = dealt(problem([12, 1, 1, 1, 1, 1, 1, 1], 3))
    assert found == [0, 1, 1, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(("ends", "expected"), [((8, 12), [0, 1, 0]), ((20, 20), [0, 1])])
def test_two_pieces_are_worth_two_hundredths(ends: tuple[int, int], expected: list[int]) -> None:
    # Both ends on one rank make it heavier by so much than one on each.
    loads = [ends[0], *[100] * 10, ends[1]]
    assert [rank for rank, _ in itertools.groupby(dealt(problem(loads, 2)))] == expected


def test_a_bad_cut_is_avoided() -> None:
    loads = [2, 2, 0, 2, 2, 2, 0, 2]
    for place in range(1, len(loads)):
        found = dealt(problem(loads, 2, avoided=(place,)))
        assert found[place] == found[place - 1], place


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=7), st.integers(1, 3), st.integers(0, 3))
def test_no_v_has_a_lighter_heaviest_rank(loads: list[int], num_ranks: int, delay: int) -> None:
    late = [delay * rank for rank in range(num_ranks)]
    best = sum(loads) + late[-1]
    for cuts in itertools.combinations_with_replacement(range(len(loads) + 1), 2 * num_ranks - 2):
        if any(a == b for a, b in itertools.pairwise((0, *cuts[:num_ranks]))):
            continue  # a rank that is left out on the way up
        ranks = list(late)
        for piece, (begin, end) in enumerate(itertools.pairwise((0, *cuts, len(loads)))):
            ranks[min(piece, 2 * num_ranks - 2 - piece)] += sum(loads[begin:end])
        best = min(best, max(ranks))
    one = problem(loads, num_ranks, delay=delay)
    assert one.bottleneck() == best
    found = dealt(one)
    ends = [sum(itertools.compress(loads, (r == k for r in found))) for k in range(num_ranks)]
    assert max(end + wait for end, wait in zip(ends, late, strict=True)) <= best
    assert set(found) == set(range(num_ranks))
    up = found.index(num_ranks - 1)
    assert found[:up] == sorted(found[:up])
    assert found[up:] == sorted(found[up:], reverse=True)
    assert set(found[:up]) == set(range(num_ranks - 1))


def test_a_long_sequence_of_large_numbers() -> None:
    loads = [(1 + (7 * i) % 11) * 10**40 for i in range(600)]
    found = dealt(problem(loads, 16))
    ranks = [sum(itertools.compress(loads, (r == k for r in found))) for k in range(16)]
    assert max(ranks) <= sum(loads) / 16 * 1.02
    assert [rank for rank, _ in itertools.groupby(found)] == [*range(16), *range(14, -1, -1)]
