from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from smdistributed.modelparallel.common.planning.contiguous import CutProblem


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    loads = draw(st.lists(st.integers(0, 5), max_size=8))
    parts = draw(st.integers(1, 4))
    bases = [draw(st.integers(0, 6)) for _ in range(parts)]
    needy = [part for part in range(parts) if not bases[part]][: len(loads)]
    return CutProblem(
        loads,
        [False] * len(loads),
        [0] * len(loads),
        bases,
        [part in needy and draw(st.booleans()) for part in range(parts)],
    )


def heaviest(problem: CutProblem, cuts: list[int]) -> int:
    return max(
        base + sum(problem.loads[begin:end])
        for base, (begin, end) in zip(problem.base_loads, itertools.pairwise(cuts), strict=True)
    )


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_bottleneck_is_that_of_the_best_cuts(problem: CutProblem) -> None:
    count, parts = len(problem.loads), len(problem.base_loads)
    possible = [
        [0, *inner, count]
        for inner in itertools.combinations_with_replacement(range(count + 1), parts - 1)
    ]
    possible = [
        cuts
        for cuts in possible
        if all(
            begin < end or not need
            for need, (begin, end) in zip(problem.needs_item, itertools.pairwise(cuts), strict=True)
        )
    ]
    assert problem.bottleneck() == min(heaviest(problem, cuts) for cuts in possible)
    assert problem.cuts() in possible
    assert heaviest(problem, problem.cuts()) == problem.bottleneck()


def test_items_without_load_do_not_stop_the_search() -> None:
    problem = CutProblem([1, 0, 3, 3], [False] * 4, [0] * 4, [0, 0], [True, True])
    assert problem.bottleneck() == 4
    assert problem.cuts() == [0, 3, 4]
