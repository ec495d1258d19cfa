"""Seeing what a function mode does not see, while a step is recorded.

Calls of modules are plain Python, and ``autograd.Function.apply`` does not dispatch to overrides;
both are replaced for the time of a recording.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.torch.pipeline.ir import NodeKind


class Listener(Protocol):
    """Who is told of intercepted calls, and makes them."""

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for ``module(*args, **kwargs)``; ``call`` is the real call."""

    def record(
        self,
        kind: NodeKind,
        target: Any,
        name: str,
        call: Callable[[], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Stands in for ``call``."""


@contextlib.contextmanager
def intercepted(listener: Listener, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Routes module calls and autograd functions through a listener.

    Args:
        listener: makes the calls.
        modules: those that are recorded; compiled ones run eagerly meanwhile.
    """
    call = nn.Module.__call__
    apply = torch.autograd.Function.__dict__["apply"]

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return listener.call_module(call, module, args, kwargs)

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        real = apply.__get__(None, cls)
        return listener.record(
            NodeKind.CALL, real, cls.__qualname__, lambda: real(*args, **kwargs), args, kwargs
        )

    # Compiled modules run eagerly here: the compiler does not nest in fake tensors.
    compiled = {
        module: module._compiled_call_impl
        for module in modules
        if module._compiled_call_impl is not None
    }
    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply_function)  # type: ignore[assignment,method-assign]
    for module in compiled:
        module._compiled_call_impl = None
    try:
        with _no_special_case_for_fakes():
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


@contextlib.contextmanager
def _no_special_case_for_fakes() -> Iterator[None]:
    """Stops Transformers from taking fake tensors for an export.

    It would choose other attention masks then, and the recording would differ from a real run.
    """
    utilities = sys.modules.get("transformers.utils.import_utils")
    former = getattr(utilities, "is_fake_tensor", None)
    if former is None:
        yield
        return
    utilities.is_fake_tensor = lambda tensor: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        utilities.is_fake_tensor = former  # type: ignore[union-attr]
