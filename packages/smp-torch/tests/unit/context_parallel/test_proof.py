"""What trials of calls find out, without other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.context_parallel.calls import (
    Length,
    shorter_by_turns,
    taken_apart,
)
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, Window
from smdistributed.modelparallel.torch.context_parallel.numbers import Given
from smdistributed.modelparallel.torch.context_parallel.proof import Kind, Proof, Trial

LENGTH, WIDTH, RANKS = 64, 6, 2
SEQUENCE = (Layout(1),)


def parts(
    function: Callable[..., Any], *args: Any, layouts: Any = (SEQUENCE,), **kwargs: Any
) -> tuple[Any, list[Any], list[Given]]:
    spec, leaves, tensors = taken_apart(args, kwargs)
    ways = [*layouts, *[(None,)] * (len(tensors) - len(layouts))]
    given = [
        Given(each.shape, each, way, way != (None,))
        for each, way in zip(tensors, ways, strict=True)
    ]
    return spec, leaves, given


def tried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Proof | None:
    spec, leaves, given = parts(function, *args, **kwargs)
    return Trial(function, spec, leaves, [leaves] * RANKS, given, RANKS).proof()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(2, LENGTH, WIDTH)  # its numbers do not count


def test_zeros_prove_nothing(x: torch.Tensor) -> None:
    weight = torch.zeros(WIDTH, WIDTH, 3)
    assert tried(functional.conv1d, x.mT, weight, layouts=((Layout(2),),), padding=1) is None
    point = torch.zeros(WIDTH, WIDTH, 1)
    found = tried(functional.conv1d, x.mT, point, layouts=((Layout(2),),))
    assert found is not None
    assert found.results[0].layout == Layout(2)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.sum(1), Kind.SUM),
        (lambda x: x.mean(1), Kind.MEAN),
        (lambda x: x.new_zeros(WIDTH), Kind.SAME),
        (lambda x: x.tanh(), Kind.CUT),
        (lambda x: (x * 100).sigmoid().amax(1), None),
        (lambda x: (x > 0).any(1), None),
        (lambda x: x * float("nan"), None),
        (torch.rand_like, None),
    ],
)
def test_kinds_of_results(x: torch.Tensor, function: Any, kind: Kind | None) -> None:
    found = tried(function, x)
    assert (None if found is None else found.results[0].kind) is kind


def test_truths_that_are_rare(x: torch.Tensor) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    assert tried(torch.any, mask, 1) is None
    assert tried(torch.all, mask, 1) is None
    labels = torch.randint(9, (2, LENGTH))
    assert tried(torch.amax, labels, 1) is None
    found = tried(torch.sum, labels, 1)
    assert found is not None
    assert found.results[0].kind is Kind.SUM


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.nanmean(1), None),
        (lambda x: x.nanmean(), None),
        (lambda x: x.nansum(1), Kind.SUM),
        (lambda x: x.nan_to_num(), Kind.CUT),
    ],
)
def test_what_is_no_number_may_be_left_out(
    x: torch.Tensor, function: Any, kind: Kind | None
) -> None:
    found = tried(function, x)
    assert (None if found is None else found.results[0].kind) is kind


@pytest.mark.parametrize("value", [0, 7, -100])
@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.amax(1),
        lambda y: y.median(),
        lambda y: y[:, 0],
        lambda y: y.roll(1, 1),
        lambda y: y.sort(1).values,
    ],
)
def test_equal_whole_numbers_do_not_hide_where_they_are(function: Any, value: int) -> None:
    assert tried(function, torch.full((2, LENGTH), value)) is None


def test_a_table_of_one_row_has_one_index() -> None:
    found = tried(functional.embedding, torch.zeros(2, LENGTH).long(), torch.rand(1, WIDTH))
    assert found is not None
    assert found.results[0].layout == Layout(1)


def test_means_of_segments_have_their_own_counts(x: torch.Tensor) -> None:
    segments = torch.zeros(2, LENGTH, WIDTH, dtype=torch.int64)  # the first batch has one

    def means(into: torch.Tensor, segments: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return into.scatter_reduce(1, segments, x, "mean", include_self=False)

    ways = ((None,), (Layout(1), None), SEQUENCE)
    assert tried(means, torch.zeros(2, 9, WIDTH), segments, x, layouts=ways) is None


def test_writes(x: torch.Tensor) -> None:
    assert tried(torch.Tensor.mul_, x, 2) is not None
    whole = torch.zeros(2, LENGTH, WIDTH)
    # A piece may not be written to a tensor that every rank has whole.
    spec, leaves, given = parts(torch.Tensor.add_, whole, x, layouts=((None, Layout(1)), SEQUENCE))
    given[0] = Given(whole.shape, whole, (None, Layout(1)), False)
    assert Trial(torch.Tensor.add_, spec, leaves, [leaves] * RANKS, given, RANKS).proof() is None


def test_whole_numbers_of_stand_ins_are_zeros_and_ones() -> None:
    with FakeTensorMode():
        tokens = torch.empty(2, LENGTH, dtype=torch.int64)
    x = torch.rand(2, LENGTH, WIDTH)
    for rows in (1, 9):
        table = torch.rand(rows, WIDTH)
        found = tried(functional.embedding, tokens, table)
        assert found is not None
        assert found.results[0].layout == Layout(1)

    def counted(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (x * tokens.unsqueeze(-1)).sum(1)

    found = tried(counted, x, tokens, layouts=(SEQUENCE, SEQUENCE))
    assert found is not None
    assert found.results[0].kind is Kind.SUM
    assert tried(lambda tokens: tokens.cumsum(1), tokens) is None
    assert tried(lambda tokens: tokens.amax(1), tokens) is None


def test_multiples_of_the_length_may_be_those_of_a_piece() -> None:
    x = torch.Size([4 * LENGTH, WIDTH])
    leaves = (x, slice(LENGTH, 3 * LENGTH, None), LENGTH + 1, -LENGTH, True)
    half = LENGTH // RANKS
    every = list(shorter_by_turns(leaves, [Length(LENGTH, (half,) * RANKS)]))
    assert every[0] == (leaves,) * RANKS
    expected = (
        torch.Size([4 * half, WIDTH]),
        slice(half, 3 * half, None),
        LENGTH + 1,
        -LENGTH,
        True,
    )
    assert every[1] == (expected,) * RANKS


def test_means_of_pieces_count_by_their_lengths() -> None:
    window = Window(LENGTH, 0, LENGTH - 1)
    x, layouts = torch.zeros(2, len(window), WIDTH), ((Layout(1, 1, window),),)
    found = tried(lambda x: x.mean(1), x, layouts=layouts)
    assert found is not None
    assert found.results[0].kind is Kind.MEAN
    flat = tried(lambda x: x.flatten(0, 1), x, layouts=layouts)
    assert flat is not None
    assert flat.results[0].layout == Layout(0, 2, window)
    assert tried(lambda x: x.nanmean(1), x, layouts=layouts) is None


def test_pieces_may_have_no_tokens() -> None:
    window = Window(LENGTH, 0, LENGTH // 4)
    x, layouts = torch.zeros(2, len(window), WIDTH), ((Layout(1, 1, window),),)
    found = tried(lambda x: x.mean(1), x, layouts=layouts)
    assert found is not None
    assert found.results[0].kind is Kind.MEAN


def test_pieces_of_several_windows_do_not_meet(x: torch.Tensor) -> None:
    one, other = x[:, 1:], x[:, :-1]
    early, late = ((Layout(1, 1, Window(LENGTH, start, start + LENGTH - 1)),) for start in (0, 1))
    assert tried(torch.add, one, other, layouts=(late, early)) is None
    assert tried(torch.add, one, other, layouts=(late, late)) is not None
