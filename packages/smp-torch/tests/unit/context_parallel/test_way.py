"""A step is tried with whole sequences, of which activations have no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
)
from smdistributed.modelparallel.torch.context_parallel.way import NumbersNeededError, WholeRun

LENGTH = 8


def tried(function: Any, *, fakes: bool = True) -> tuple[Any, WholeRun]:
    """Returns what a function of tokens gives when it is tried, and the run."""
    tokens = torch.arange(LENGTH)
    run = WholeRun([tokens], FakeTensorMode(allow_non_fake_inputs=True) if fakes else None)
    with torch.no_grad(), run:
        return function(tokens), run


def test_what_parameters_meet_has_no_numbers() -> None:
    embedding, head = nn.Embedding(LENGTH, 4), nn.Linear(4, 2**40, device="meta")
    head.weight = nn.Parameter(torch.zeros(1).expand(2**40, 4))  # nobody has so much memory

    def forward(tokens: torch.Tensor) -> Any:
        positions = tokens.cumsum(0)
        assert int(positions.max()) == LENGTH * (LENGTH - 1) // 2
        return nn.functional.linear(embedding(tokens), head.weight)

    result, run = tried(forward)
    assert isinstance(result, FakeTensor)
    assert run.way.wholes[-1].results == (torch.Size([LENGTH, 2**40]),)


def test_a_question_about_them_is_an_error() -> None:
    layer = nn.Embedding(LENGTH, 4)

    def forward(tokens: torch.Tensor) -> bool:
        return bool(layer(tokens).sum() > 0)

    with pytest.raises(DATA_DEPENDENT):
        tried(forward)
    assert tried(forward, fakes=False)[0] in (True, False)


def test_what_they_are_written_to_would_be_stale() -> None:
    layer, buffer = nn.Embedding(LENGTH, 4), torch.zeros(4)
    with pytest.raises(NumbersNeededError):
        tried(lambda tokens: buffer.add_(layer(tokens).mean(0)))
    tried(lambda tokens: buffer.add_(layer(tokens).mean(0)), fakes=False)
    assert buffer.any()


def test_a_mask_with_numbers_says_how_many_tokens_it_chooses() -> None:
    layer = nn.Embedding(LENGTH, 4)
    result, run = tried(lambda tokens: layer(tokens)[tokens > 2])
    assert isinstance(result, FakeTensor)
    assert run.way.wholes[-1].results == (torch.Size([LENGTH - 3, 4]),)
    both, _ = tried(lambda tokens: layer(tokens)[None][torch.ones(1, dtype=torch.bool), tokens > 2])
    assert both.shape == (LENGTH - 3, 4)
