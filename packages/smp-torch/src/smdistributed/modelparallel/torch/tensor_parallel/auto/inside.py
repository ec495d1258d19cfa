"""What surrounds the code of a split module while it runs on slices, and when it runs again.

Activation checkpointing computes what it is given once more in a backward pass, when no call of the
module is in progress: its slices are used then as they were, and what drops goes on from where it
was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import is_in_backward
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import SplitDraws
from smdistributed.modelparallel.torch.tensor_parallel.auto.split_linear import Gate
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import using_own_slices

#: The innermost is in progress.
_running: list[tuple[nn.Module, Gate, SplitDraws | None]] = []


@contextlib.contextmanager
def computing(module: nn.Module, gate: Gate, draws: SplitDraws | None) -> Iterator[None]:
    """Inside, the code of a split module runs, and may use its slices.

    Args:
        module: it.
        gate: of the module.
        draws: what of the call drops; None: nothing does.
    """
    former, gate.is_open = gate.is_open, True
    _running.append((module, gate, draws))
    try:
        yield
    finally:
        _running.pop()
        gate.is_open = former


def computing_when_recomputed() -> contextlib.AbstractContextManager[None]:
    """Has what is checkpointed in split modules use slices also when it is computed again."""

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        if not _running:
            return function
        module, gate, draws = _running[-1]
        draws = draws and draws.copy()
        forward = using_own_slices(lambda _, *args, **kwargs: function(*args, **kwargs), _as_it_is)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_in_backward():
                return function(*args, **kwargs)
            following = draws and draws.copy()
            with computing(module, gate, following), following or contextlib.nullcontext():
                return forward(module, *args, **kwargs)

        return call

    def replace(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        return (
            lambda function, *args, **kwargs: around(again(function), *args, **kwargs),
            lambda function, *args: reentrant(again(function), *args),
        )

    return checkpointing_replaced(replace)


def _as_it_is(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)
