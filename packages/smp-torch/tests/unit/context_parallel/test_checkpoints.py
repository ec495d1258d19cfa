"""What is checkpointed in a step whose sequences are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.torch.compat.between import standing_between
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.context_parallel.checkpoints import repeated_for_pieces
from smdistributed.modelparallel.torch.context_parallel.seeing import RunMode


class Calls(RunMode):
    """Takes note of calls, and makes them."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def take(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.functions.append(function)
        with self.aside():
            return function(*args, **kwargs)


class Note(torch.autograd.Function):
    """As what PyTorch 2.11 keeps the arguments of a checkpointed call by."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def noting(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        Note.apply(torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        yield from around(*args, **kwargs)
        torch.empty(0)

    return region, reentrant


def test_what_torch_notes_of_a_checkpointed_call_is_no_part_of_the_step() -> None:
    calls: Any = Calls()
    given = torch.ones(3, requires_grad=True)
    replaced = checkpointing_replaced(noting)
    with replaced, repeated_for_pieces(calls), standing_between(calls), calls:
        checkpoint(torch.exp, given, use_reentrant=False)
    assert calls.functions == [torch.exp]
