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


def _unheard(function: Any) -> None:
    """Hears of an autograd function, and does nothing."""


_between: Between | None = None
#: Hears of autograd functions that are applied within a call of it.
_applied_inside: Callable[[Any], object] = _unheard


@contextlib.contextmanager
def standing_between(
    between: Between, applied_inside: Callable[[Any], object] = _unheard
) -> Iterator[None]:
    """Inside, calls that no mode of torch sees go to ``between``, too.

    One may stand in the place of another for a while. What is replaced for the first serves all: to
    change a method of all modules costs half a millisecond, since Python forgets what it has looked
    up of each of their classes.

    Args:
        between: takes them down, or answers them.
        applied_inside: hears of autograd functions that are applied within a call.
    """
    global _between, _applied_inside
    former = _between, _applied_inside
    _between, _applied_inside = between, applied_inside
    try:
        with _calls_seen() if former[0] is None else contextlib.nullcontext():
            yield
    finally:
        _between, _applied_inside = former


@contextlib.contextmanager
def _calls_seen() -> Iterator[None]:
    """Inside, calls that no mode of torch sees come to who stands between."""

    def apply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _between is None or _between.is_inside:
            _applied_inside(function)
            return function(*args, **kwargs)
        return _between.take(function, args, kwargs)

    def call(module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert _between is not None, "calls are left alone where nobody stands between"
        return _between.take_compiled(module, args, kwargs)

    def are_left_alone() -> bool:
        return _between is None or _between.is_inside

    with applications_replaced(apply), compiled_calls_replaced(are_left_alone, call):
        yield


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
