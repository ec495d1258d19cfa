"""Whether two modules compute the same, but for the values of their weights.

What was proven of one then holds for the other. What cannot be compared must be one object of both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.state.reads import EVERYTHING

_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MISSING = object()
#: Compared in any case, or set before a module is tried.
_APART = {"_parameters", "_buffers", "_modules", "training"}


def are_alike(one: nn.Module, other: nn.Module, read: Collection[tuple[str, str]]) -> bool:
    """Tells whether two modules and all in them are of one kind and have equal tensors and state.

    Args:
        one, other: neither of which is in the other.
        read: what counts of their state: names of modules and attributes.
    """
    mine, theirs = (dict(each.named_modules(remove_duplicate=False)) for each in (one, other))
    if list(mine) != list(theirs):
        return False
    pair = _Pair()
    if not all(pair.are_one_kind(each, theirs[name]) for name, each in mine.items()):
        return False
    return all(
        pair.are_equal(*(_value(modules[name], attribute) for modules in (mine, theirs)))
        for name, attribute in read
        if attribute not in _APART
    )


def _value(module: nn.Module, attribute: str) -> Any:
    if attribute != EVERYTHING:
        return vars(module).get(attribute, _MISSING)
    return {name: value for name, value in vars(module).items() if name not in _APART}


class _Pair:
    """Two modules that are compared: what is one object at two places in one must be so in both."""

    def __init__(self) -> None:
        self._partners: dict[int, int] = {}
        self._taken: set[int] = set()

    def are_one_kind(self, mine: nn.Module, theirs: nn.Module) -> bool:
        """Compares two modules at the same place but for their state."""
        return (
            type(mine) is type(theirs)
            and self._are_partners(mine, theirs)
            and all(
                self.are_equal(dict(vars(mine)[kind]), dict(vars(theirs)[kind]))
                for kind in ("_parameters", "_buffers")
            )
        )

    def are_equal(self, mine: Any, theirs: Any) -> bool:
        """Compares what is at the same place in both."""
        if type(mine) is not type(theirs):
            return False
        if isinstance(mine, nn.Module):  # all in one have been compared
            return self._are_partners(mine, theirs)
        if isinstance(mine, torch.Tensor):
            return self._are_partners(mine, theirs) and self._are_equal_tensors(mine, theirs)
        if mine is theirs:
            return True
        if type(mine) in (dict, OrderedDict):
            same_keys = self.are_equal(list(mine), list(theirs))
            return same_keys and self.are_equal(list(mine.values()), list(theirs.values()))
        if type(mine) in (list, tuple):
            pairs = zip(mine, theirs, strict=False)
            return len(mine) == len(theirs) and all(self.are_equal(*pair) for pair in pairs)
        if type(mine) in (set, frozenset):
            typed = [{(type(each), repr(each)) for each in one} for one in (mine, theirs)]
            return all(type(each) in _VALUES for each in mine | theirs) and typed[0] == typed[1]
        # By what is printed zeros have signs.
        return type(mine) in _VALUES and repr(mine) == repr(theirs)

    def _are_partners(self, mine: object, theirs: object) -> bool:
        if id(mine) not in self._partners and id(theirs) not in self._taken:
            self._partners[id(mine)] = id(theirs)
            self._taken.add(id(theirs))
        return self._partners.get(id(mine)) == id(theirs)

    def _are_equal_tensors(self, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
        looks = [
            (each.shape, each.dtype, each.device, each.requires_grad) for each in (mine, theirs)
        ]
        if looks[0] != looks[1] or not self.are_equal(dict(vars(mine)), dict(vars(theirs))):
            return False
        return isinstance(mine, nn.Parameter) or torch.equal(mine, theirs)
