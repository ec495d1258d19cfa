"""Who stands between Python and torch while the calls of a pass are taken down or answered.

Functions of torch are seen by a mode; what no mode sees comes here: autograd functions, and
functions of this library that are one call, are no calls, or wait until there are tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import applications_replaced
from smdistributed.modelparallel.torch.compat.private.compiled import compiled_calls_replaced

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Between(Protocol):
    """Who takes calls down, or answers them."""

    @property
    def is_inside(self) -> bool:
        """Whether a call is in progress: what that calls is part of it."""

    def take(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Stands in for a call."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, calls are none of the pass."""

    def when_real(self, tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
        """Does something with a tensor of the pass, as soon as it is one; it is no call."""

    def take_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stands in for a call of a module that runs as compiled code."""


_between: Between | None = None


@contextlib.contextmanager
def standing_between(
    between: Between, applied_inside: Callable[[Any], object] = lambda function: None
) -> Iterator[None]:
    """Inside, calls that no mode of torch sees go to ``between``, too.

    Args:
        between: takes them down, or answers them.
        applied_inside: hears of autograd functions that are applied within a call.
    """
    global _between

    def apply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if between.is_inside:
            applied_inside(function)
            return function(*args, **kwargs)
        return between.take(function, args, kwargs)

    def call(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return between.take_compiled(module, args, kwargs)

    former, _between = _between, between
    try:
        with applications_replaced(apply), compiled_calls_replaced(lambda: between.is_inside, call):
            yield
    finally:
        _between = former


def atomic(function: _Function) -> _Function:
    """Has a function be one call; what it does depends on its arguments alone."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        between = _between
        if between is None or between.is_inside:
            return function(*args, **kwargs)
        return between.take(function, args, kwargs)

    return call  # type: ignore[return-value]


def effect(function: _Function) -> _Function:
    """The same of a function that does something on the device without tensors."""
    function.is_effect = True  # type: ignore[attr-defined]
    return atomic(function)


def no_call(function: _Function) -> _Function:
    """Has a function be none of a pass: it talks to other ranks, and computes nothing."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        between = _between
        if between is None or between.is_inside:
            return function(*args, **kwargs)
        with between.aside():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def when_real(tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
    """Does something with a tensor of a pass, as soon as it is one."""
    between = _between
    if between is None or between.is_inside:
        do(tensor)
    else:
        between.when_real(tensor, do)
