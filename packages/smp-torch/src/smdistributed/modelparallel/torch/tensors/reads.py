"""Whether code reads the weights of linear maps by itself, where a call would know of slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.tensors.nested import tensors_in

_Whose = TypeVar("_Whose")


class Reads(TorchFunctionMode, Generic[_Whose]):
    """Notes what functions of torch are given some parameters, as long as it is entered.

    Such as ``weight.dtype``, that return no tensor, do not count.

    Args:
        whose: the maps that they belong to, by the id of each parameter.
        is_called: tells whether a map is being called, which may read its own.

    Attributes:
        found: the maps whose parameters were read otherwise.
    """

    def __init__(self, whose: Mapping[int, _Whose], is_called: Callable[[_Whose], bool]) -> None:
        super().__init__()
        self._whose = whose
        self._is_called = is_called
        self.found: list[_Whose] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) or tensors_in(result):
            for each in tensors_in((args, kwargs)):
                owner = self._whose.get(id(each))
                if owner is not None and owner not in self.found and not self._is_called(owner):
                    self.found.append(owner)
        return result
