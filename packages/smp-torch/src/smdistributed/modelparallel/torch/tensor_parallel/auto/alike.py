"""Whether two modules compute the same but for the values of their weights.

What was proven of one then holds for the other. What cannot be compared must be one object of both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_VALUES = (bool, int, float, complex, str, bytes, torch.device, torch.Size)


def are_alike(
    one: nn.Module, other: nn.Module, value_of: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Tells whether two modules and all in them are of one kind and have equal state.

    Args:
        one, other: neither of which is in the other.
        value_of: gives a buffer its values where they are delayed.
    """
    return _Pair(value_of).are_equal(one, other)


class _Pair:
    """Two modules that are compared: what is one object at two places in one must be so in both."""

    def __init__(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._value_of = value_of
        self._partners: dict[int, int] = {}

    def are_equal(self, mine: Any, theirs: Any) -> bool:
        """Compares what is at the same place in both."""
        if type(mine) is not type(theirs):
            return False
        if isinstance(mine, nn.Module | torch.Tensor):
            if id(mine) in self._partners or id(theirs) in self._partners.values():
                return self._partners.get(id(mine)) == id(theirs)
            self._partners[id(mine)] = id(theirs)
            if isinstance(mine, torch.Tensor):
                return self._are_equal_tensors(mine, theirs)
            return self.are_equal(vars(mine), vars(theirs))
        if mine is theirs:
            return True
        if type(mine) in (dict, OrderedDict):
            same_keys = list(mine) == list(theirs)
            return same_keys and self.are_equal(list(mine.values()), list(theirs.values()))
        if type(mine) in (list, tuple):
            pairs = zip(mine, theirs, strict=False)
            return len(mine) == len(theirs) and all(self.are_equal(*pair) for pair in pairs)
        if type(mine) in (set, frozenset):
            return all(type(each) in _VALUES for each in mine | theirs) and bool(mine == theirs)
        return type(mine) in _VALUES and bool(mine == theirs)

    def _are_equal_tensors(self, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
        looks = [
            (each.shape, each.dtype, each.device, each.requires_grad, list(vars(each)))
            for each in (mine, theirs)
        ]
        if looks[0] != looks[1]:
            return False
        if isinstance(mine, nn.Parameter):
            return True
        return torch.equal(self._value_of(mine), self._value_of(theirs))
