"""Which linear maps of a module read its arguments, and which read what others made."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.compat.private import pytree

Names = frozenset[str]


class Origins(TorchFunctionMode):
    """Follows, in one call of a module, what tensors were computed from: the last linear maps.

    A guess, which a proof follows: what views share memory is not followed.

    Args:
        module: that is called.

    Attributes:
        read_by: of each linear map that was called, the maps whose results lead to its input.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.read_by: dict[str, Names] = {}
        self._linears = {
            id(each.weight): name
            for name, each in module.named_modules()
            if type(each) is nn.Linear
        }
        self._of: dict[int, Names] = {}
        self._kept: list[torch.Tensor] = []  # ids stay theirs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        origins: Names = frozenset().union(*map(self.of, given))
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if func is F.linear and id(weight) in self._linears:
            name = self._linears[id(weight)]
            origins = self.of(given[0])
            self.read_by[name] = self.read_by.get(name, frozenset()) | origins
            origins = frozenset({name})
        # What returns nothing writes to its first tensor.
        for each in given[:1] if result is None else _tensors(result):
            self._of[id(each)] = origins
            self._kept.append(each)
        return result

    def of(self, tensor: torch.Tensor) -> Names:
        """Returns the maps whose results lead to a tensor."""
        return self._of.get(id(tensor), frozenset())


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(nested) if isinstance(each, torch.Tensor)]
