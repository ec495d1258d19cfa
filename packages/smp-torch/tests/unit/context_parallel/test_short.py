"""Which calls with a long sequence are tried with a short one, without other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.context_parallel import short
from smdistributed.modelparallel.torch.context_parallel.calls import taken_apart
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, Window
from smdistributed.modelparallel.torch.context_parallel.numbers import Given
from smdistributed.modelparallel.torch.context_parallel.proof import Proof, Trial

LENGTH, SHORT, WIDTH, RANKS = 64, 32, 48, 2
SEQUENCE = (Layout(1),)
HALF = LENGTH // RANKS


@pytest.fixture(autouse=True)
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "LONG", 0)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(2, LENGTH, WIDTH)


def tried(
    function: Callable[..., Any], args: Any, own: Any = None, layouts: Any = (SEQUENCE,)
) -> tuple[Any, list[short.Short]]:
    """Returns the structure of a call, and it with short sequences."""
    spec, whole, tensors = taken_apart(args, {})
    _, of_own, _ = taken_apart(args if own is None else (args[0], *own), {})
    ways = [*layouts, *[(None,)] * (len(tensors) - len(layouts))]
    given = [
        Given(each.shape, each, way, way != (None,))
        for each, way in zip(tensors, ways, strict=True)
    ]
    found = short.shortened(function, spec, whole, [of_own] * RANKS, given, LENGTH, RANKS)
    return spec, list(found)


def proven(function: Callable[..., Any], *args: Any, own: Any = None) -> Proof | None:
    spec, (found, *_) = tried(function, args, own)
    assert {each.shape[1] for each in found.given if each.is_own} == {SHORT}
    return Trial(function, spec, found.whole, found.own, found.given, RANKS).proof()


def is_short(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return bool(tried(function, args, **kwargs)[1])


def test_what_is_not_long(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "LONG", x.numel() + 1)
    assert not is_short(torch.tanh, x)


def test_calls_without_numbers(x: torch.Tensor) -> None:
    assert proven(torch.tanh, x)
    assert proven(functional.linear, x, torch.zeros(4, WIDTH))
    assert proven(torch.cumsum, x, 1) is None
    # Windows of a sequence are not shorter.
    windows = x.reshape(-1, 32, WIDTH)
    assert not is_short(torch.tanh, windows, layouts=((Layout(0, 2),),))


def test_numbers_that_are_sizes(x: torch.Tensor) -> None:
    found = proven(torch.Tensor.view, x, -1, WIDTH)
    assert found is not None
    assert found.results[0].layout == Layout(0, 2)
    assert proven(torch.reshape, x, (2, -1, WIDTH // 3, 3))
    assert proven(functional.layer_norm, x, (WIDTH,))
    assert proven(torch.Tensor.unflatten, x, 2, (3, 16))


def test_numbers_of_another_dim(x: torch.Tensor) -> None:
    assert proven(torch.split, x, 16, 2)
    assert proven(torch.roll, x, 16, 2)
    assert proven(torch.Tensor.__getitem__, x, (..., slice(None, 24)))
    assert proven(torch.narrow, x, -1, 8, 16)


def test_numbers_that_are_lengths(x: torch.Tensor) -> None:
    own = torch.Size([2, HALF, 3, 16])
    assert proven(torch.Tensor.view, x, torch.Size([2, LENGTH, 3, 16]), own=(own,))
    assert proven(torch.Tensor.view, x, 2, LENGTH // 2, 2, -1, own=(2, HALF // 2, 2, -1))
    # Another part of it, or the whole where each rank has a piece.
    assert not is_short(torch.Tensor.view, x, 2, LENGTH, -1, own=(2, HALF // 2, -1))
    assert not is_short(torch.Tensor.view, x, 2, LENGTH, -1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (torch.Tensor.__getitem__, x, (slice(None), slice(0, 40))),
        lambda x: (torch.roll, x, 32, 1),
        lambda x: (torch.tril, x, 40),
        lambda x: (torch.split, x, 16, 1),
        lambda x: (torch.narrow, x, 1, 0, 16),
        lambda x: (torch.topk, x, 16, 1),
    ],
)
def test_numbers_along_the_sequence(x: torch.Tensor, call: Any) -> None:
    """What they do depends on how long it is."""
    assert not is_short(*call(x))


def test_windows_fit_into_blocks_or_not(x: torch.Tensor) -> None:
    found = proven(torch.Tensor.view, x, 2, -1, 2, WIDTH)
    assert found is not None
    for length, is_fit in ((4004, False), (4008, True)):
        assert short.fits(found, [torch.Size([2, length // 2, 2, WIDTH])], RANKS) is is_fit


def test_labels_of_which_every_rank_has_all() -> None:
    logits, labels = torch.zeros(LENGTH, 5), torch.zeros(LENGTH, dtype=torch.long)
    ways = ((Layout(0),), (None, Layout(0)))
    function = functional.cross_entropy
    args = (logits, labels, None, None, -100, None, "sum")
    spec, (found,) = tried(function, args, layouts=ways)
    assert [each.shape[0] for each in found.given] == [SHORT, SHORT]
    proof = Trial(function, spec, found.whole, found.own, found.given, RANKS).proof()
    assert proof is not None
    assert proof.layouts == (Layout(0), Layout(0))


def test_numbers_that_are_values() -> None:
    logits, labels = torch.zeros(LENGTH, 5), torch.zeros(LENGTH, dtype=torch.long)

    def loss(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")

    cuts = ((Layout(0),), (Layout(0),))
    assert is_short(loss, logits, labels, -100, layouts=cuts)
    assert is_short(torch.add, logits, 40, layouts=cuts[:1])
    assert is_short(torch.clamp, logits, 0, 40, layouts=cuts[:1])
    # This may be the length, over which something is averaged.
    assert not is_short(torch.div, logits, LENGTH, layouts=cuts[:1])


@pytest.mark.parametrize(("start", "stop"), [(0, 63), (1, 64), (-2, 64), (32, 64)])
def test_windows_on_a_long_sequence(start: int, stop: int) -> None:
    window = Window(LENGTH, start, stop)
    logits, labels = torch.zeros(len(window), 5), torch.zeros(len(window), dtype=torch.long)
    layout = Layout(0, 1, window)
    args = (logits, labels, None, None, -100, None, "sum")
    function = functional.cross_entropy
    spec, (found,) = tried(function, args, layouts=((layout,), (None, layout)))
    assert found.given[0].shape[0] < SHORT + 8
    proof = Trial(function, spec, found.whole, found.own, found.given, RANKS).proof()
    assert proof is not None
    assert found.lengthened(proof).layouts == (layout, layout)
