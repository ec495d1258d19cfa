"""Seeing each call of a function of torch that the code of a step makes."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.compat.private.compiled import call_as_written
from smdistributed.modelparallel.torch.tensors.functions import UNRECORDED


class RunMode(TorchFunctionMode):
    """Gets the calls that modes see, and those of autograd functions, see ``Between``.

    Attributes:
        is_inside: whether a call is in progress: what that calls is part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_inside = False

    @abstractmethod
    def take(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_inside or func in UNRECORDED:
            return func(*args, **(kwargs or {}))
        return self.take(func, args, kwargs or {})

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See ``Between``."""
        former, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = former

    def when_real(self, tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
        """See ``Between``: tensors are real."""
        do(tensor)

    def take_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See ``Between``: compiled code shows no calls, so it runs as it is written."""
        return call_as_written(module, args, kwargs)
