"""Tokens are put together on each rank of those that it has, and of others'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.torch.context_parallel.calls import results_of, taken_apart
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, Window, cut
from smdistributed.modelparallel.torch.context_parallel.moving import (
    Assembly,
    Source,
    assembly,
    target,
    whole_tokens,
)
from smdistributed.modelparallel.torch.context_parallel.tokens import Moved, moved_tokens

LENGTH, WIDTH = 24, 3


class Group:
    """Ranks that are threads."""

    def __init__(self, rank: int, size: int, shared: dict[Any, Any]) -> None:
        self.rank, self.size = rank, size
        self._shared = shared
        self.num_given = 0

    def swap(
        self, sent: torch.Tensor, dim: int, given: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        self.num_given += sum(given)
        for other, part in enumerate(sent.split(list(given), dim)):
            self._shared[self.rank, other] = part
        self._shared["barrier"].wait()
        found = [self._shared[other, self.rank] for other in range(self.size)]
        self._shared["barrier"].wait()
        assert [each.shape[dim] for each in found] == list(taken)
        return torch.cat(found, dim)


def on_ranks(size: int, body: Callable[[Any], Any]) -> list[Any]:
    shared: dict[Any, Any] = {"barrier": threading.Barrier(size, timeout=20)}
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = body(Group(rank, size, shared))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def tokens_of(function: Any, *args: torch.Tensor) -> Moved:
    spec, leaves, _ = taken_apart(args, {})
    shapes = [each.shape for each in results_of(function(*args))]
    found = moved_tokens(function, spec, leaves, [each.shape for each in args], 1, shapes)
    assert found is not None
    (moved,) = found[0]
    return moved


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("function", "window", "num_given"),
    [
        (lambda x, y: x[:, :-1], Window(24, 0, 23), 0),
        (lambda x, y: x[:, 12:], Window(24, 12, 24), 0),
        (lambda x, y: torch.cat([y, x], 1), Window(24, -2, 24), 0),
        (lambda x, y: torch.cat([x, y], 1), Window(24, 0, 26), 0),
        (lambda x, y: x.flip(1), None, 0),
        # What crosses the ends of blocks: all of them but the middle, where a rank has both sides.
        (lambda x, y: x.roll(1, 1), None, lambda n: 2 * n - 2),
        (lambda x, y: torch.cat([x[:, 1:], y[:, :1]], 1), None, lambda n: 2 * n - 2),
        (lambda x, y: x.repeat(1, 2, 1), None, None),
    ],
)
def test_results_are_those_of_one_process(
    function: Any, window: Window | None, num_given: Any, num_ranks: int
) -> None:
    x, y = torch.rand(2, LENGTH, WIDTH), torch.rand(2, 2, WIDTH)
    tokens = tokens_of(function, x, y)
    sources = [Source(LENGTH, Layout(1)), Source(2, None)]
    layout = target(tokens, 1, sources, LENGTH, num_ranks)
    assert layout == Layout(1, 1, window)

    def made(group: Any) -> tuple[torch.Tensor, int]:
        put = assembly(tokens, 1, sources, layout, group)
        return put.run(group, [cut(x, Layout(1), group.rank, num_ranks), y]), group.num_given

    found = on_ranks(num_ranks, made)
    for rank, (each, _) in enumerate(found):
        torch.testing.assert_close(each, cut(function(x, y), layout, rank, num_ranks))
    if num_given is not None:
        expected = num_given(num_ranks) if callable(num_given) else num_given
        assert sum(count for _, count in found) == expected


def test_as_many_tokens_as_the_step_has_are_in_its_blocks() -> None:
    x = torch.rand(1, 19, WIDTH)
    sources = [Source(19, Layout(1, 1, Window(24, 0, 19)))]
    tokens = tokens_of(lambda x: x[:, 3:], x)
    assert target(tokens, 1, sources, 16, 4) == Layout(1)
    # The first of four ranks, with blocks of three, would have none.
    assert target(tokens, 1, sources, 18, 4) == Layout(1)
    few = tokens_of(lambda x: x[:, 3:6], x)
    assert target(few, 1, sources, 18, 4) == Layout(1, 1, Window(24, 3, 6))


def test_windows_are_moved_to_another_one() -> None:
    whole = torch.rand(3 * 23, 2)
    one, other = Layout(0, 3, Window(24, 0, 23)), Layout(0, 3, Window(24, 1, 24))

    def made(group: Any) -> torch.Tensor:
        put = assembly(whole_tokens(23), 0, [Source(23, one)], other, group, 3)
        return put.run(group, [cut(whole, one, group.rank, 3)])

    for rank, each in enumerate(on_ranks(3, made)):
        assert torch.equal(each, cut(whole, other, rank, 3))


def test_one_token_is_everyones() -> None:
    x = torch.rand(2, LENGTH, WIDTH)
    tokens = tokens_of(lambda x: x[:, 5], x)

    def made(group: Any) -> tuple[torch.Tensor, Assembly]:
        put = assembly(tokens, 1, [Source(LENGTH, Layout(1))], None, group)
        return put.run(group, [cut(x, Layout(1), group.rank, 2)]), put

    for each, put in on_ranks(2, made):
        assert torch.equal(each, x[:, 5])
        assert not put.is_local


def test_a_window_is_a_look_at_memory() -> None:
    x = torch.rand(2, LENGTH, WIDTH)
    tokens = tokens_of(lambda x: x[:, 1:], x)
    piece = cut(x, Layout(1), 0, 2)
    group: Any = Group(0, 2, {})
    put = assembly(tokens, 1, [Source(LENGTH, Layout(1))], Layout(1, 1, Window(24, 1, 24)), group)
    assert put.is_local
    assert put.run(group, [piece]).data_ptr() == piece[:, 1:].data_ptr()
