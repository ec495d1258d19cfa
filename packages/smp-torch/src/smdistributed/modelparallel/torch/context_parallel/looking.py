"""Running a body for whole sequences, to see what it calls, and leaving nothing of it behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.between import standing_between
from smdistributed.modelparallel.torch.compat.private.distributions import arguments_unchecked
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.context_parallel.seeing import RunMode
from smdistributed.modelparallel.torch.state.python_random import python_random_kept
from smdistributed.modelparallel.torch.state.snapshot import Snapshot


@contextlib.contextmanager
def leaving_nothing(
    modules: Sequence[nn.Module],
    code: Sequence[Callable[..., Any]],
    draws_apart: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[Snapshot]:
    """Puts back what code changes inside: Python's state, numbers of buffers, generators.

    Yields Python's state before.

    Args:
        modules: that may be called.
        code: that calls them.
        draws_apart: keeps PyTorch's draws out of the step.
    """
    before = Snapshot(modules, code)
    try:
        with _buffers_kept(modules), python_random_kept(), draws_apart(), torch.no_grad():
            yield before
    finally:
        before.note_changes()
        before.put_all_back()


@contextlib.contextmanager
def seeing(run: RunMode) -> Iterator[None]:
    """Has a run see the calls that are made inside.

    Of which some would ask for numbers of the whole, or compare shapes of pieces with its own.
    """
    with arguments_unchecked(), standing_between(run), run:
        yield


@contextlib.contextmanager
def _buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts the numbers of buffers back that are written to inside."""
    own = {id(each): each for module in modules for each in module._buffers.values()}
    buffers = [each for each in own.values() if each is not None]
    before = [(version_of(each), each.detach().clone()) for each in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, (version, values) in zip(buffers, before, strict=True):
                if version_of(buffer) != version:
                    buffer.copy_(values)
