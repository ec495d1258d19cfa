"""Activation checkpointing of a step whose sequences are split.

What a backward pass computes again are the calls of the forward pass, in their order: what is done
for each of them is known. It runs in another thread where there are GPUs, so it takes its mode with
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.between import no_call, standing_between
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.context_parallel.calls import taken_apart
from smdistributed.modelparallel.torch.context_parallel.run import PieceRun
from smdistributed.modelparallel.torch.context_parallel.seeing import RunMode


def repeated_for_pieces(run: PieceRun) -> contextlib.AbstractContextManager[None]:
    """Inside, what is checkpointed is computed again as ``run`` has computed it."""
    unseen = no_call(next)

    def replace(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            generator = around(again(function), *args, **kwargs)
            # What torch notes of the call is no part of the step; PyTorch 2.11 applies a function.
            unseen(generator)
            yield
            unseen(generator, None)

        return region, instead

    def instead(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        # An autograd function around a part of the step would be one call, and hide what is in it.
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        start = run.number

        def repeat(*args: Any, **kwargs: Any) -> Any:
            repeated = _Again(run, start)
            with standing_between(repeated), repeated:
                return function(*args, **kwargs)

        return repeat

    return checkpointing_replaced(replace)


class _Again(RunMode):
    """Makes the calls of a run again.

    Args:
        run: what made them.
        start: the number of the first.
    """

    def __init__(self, run: PieceRun, start: int) -> None:
        super().__init__()
        self._run = run
        self._number = start

    def take(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See ``RunMode.take``."""
        number, self._number = self._number, self._number + 1
        with self.aside():
            spec, leaves, tensors = taken_apart(args, kwargs)
            proven = self._run.proven(number)
            if proven is None or proven.call.function != function:
                raise SMPError(
                    "what was checkpointed calls other functions of PyTorch when it is computed "
                    "again in the backward pass; with context_parallel_degree it must do the same."
                )
            return proven.action.run(self._run.group, function, spec, leaves, tensors)
