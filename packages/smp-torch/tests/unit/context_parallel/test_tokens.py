"""Which calls move tokens, and which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.context_parallel import tokens
from smdistributed.modelparallel.torch.context_parallel.calls import results_of, taken_apart
from smdistributed.modelparallel.torch.context_parallel.tokens import Run, moved_tokens

LENGTH, WIDTH = 16, 6


def moved(function: Any, *args: Any) -> Any:
    spec, leaves, given = taken_apart(args, {})
    shapes = [each.shape for each in results_of(function(*args))]
    found = moved_tokens(function, spec, leaves, [each.shape for each in given], 1, shapes)
    return None if found is None else [each.runs for each in found[0]]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(2, LENGTH, WIDTH)


@pytest.mark.parametrize("is_large", [False, True])
def test_tokens_of_one_tensor(
    x: torch.Tensor, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(tokens, "_LARGE", 0)
        monkeypatch.setattr(tokens, "_FEW", 2)
    assert moved(lambda x: x[:, :-1], x) == [(Run(0, 0, 1, 15),)]
    assert moved(lambda x: x[:, 3], x) == [(Run(0, 3, 1, 1),)]
    assert moved(lambda x: x.roll(2, 1), x) == [(Run(0, 14, 1, 2), Run(0, 0, 1, 14))]
    assert moved(lambda x: x.flip(1), x) == [(Run(0, 15, -1, 16),)]
    assert moved(lambda x: x.split([4, 12], 1), x) == [(Run(0, 0, 1, 4),), (Run(0, 4, 1, 12),)]
    padded = (Run(-1, 0, 1, 1, -100.0), Run(0, 0, 1, 15))
    assert moved(lambda x: functional.pad(x, (0, 0, 1, -1), value=-100), x) == [padded]


def test_tokens_of_several(x: torch.Tensor) -> None:
    first = torch.rand(2, 1, WIDTH)
    assert moved(lambda *each: torch.cat(each, 1), first, x) == [
        (Run(0, 0, 1, 1), Run(1, 0, 1, 16))
    ]
    labels = torch.ones(2, LENGTH, dtype=torch.int64)
    assert moved(lambda y: functional.pad(y[:, 1:], (0, 1), value=-100), labels) == [
        (Run(0, 1, 1, 15), Run(-1, 0, 1, 1, -100.0))
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 1:].relu(),
        lambda x: x[:, :-1] * 2,
        lambda x: x.sort(1).values,
        lambda x: x.sort(2).values[:, 1:],
        lambda x: x.cummax(1).values,
        lambda x: x[:, 1:].flip(2),
        lambda x: x[:, 1:].flip(0),
        lambda x: x[:, 1:].mT,
        lambda x: x[:, 1:, :2],
        lambda x: x[:, 1:].float(),
        lambda x: x[:, :4] + x[:, 4:8],
        lambda x: x[x > 0.5],
        lambda x: torch.nn.functional.dropout(x)[:, 1:],
    ],
)
def test_what_does_anything_else(x: torch.Tensor, function: Any) -> None:
    assert moved(function, x.double()) is None
