"""Objects with state of their own that recorded code hands to modules: a cache, say.

A module may change such an object, and later modules see it. Ranks have no common memory, so each
gets a copy of the object as it was when it was first handed over, for each microbatch, and its
modules share that. While the step is recorded, each module runs once on the object itself and once
on the copy of its rank: if it does not do the same, it depends on what another rank's modules left
in the object, and that is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError


class Carried:
    """Stands in templates for an object with state.

    Attributes:
        index: position among the carried objects of the graph.
        pristine: a copy of the object as it was first handed over.
    """

    def __init__(self, index: int, obj: Any, where: str) -> None:
        if holds_tensors(obj):
            raise UnsupportedError(
                f"{where} passes an object of class {type(obj).__module__}."
                f"{type(obj).__qualname__} that holds tensors between partitions; only tensors, "
                "containers of tensors and plain constants can be passed. Keep the object inside "
                "one module, or put the modules that share it on one partition."
            )
        self.index = index
        self.pristine = copy.deepcopy(obj)

    def __repr__(self) -> str:
        return f"object {self.index} of class {type(self.pristine).__name__}"

    def copy(self) -> Any:
        """Returns the object for one rank and microbatch."""
        return copy.deepcopy(self.pristine)


class CarriedObjects:
    """The copies of one rank for one microbatch."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}

    def clear(self) -> None:
        """Lets go of the copies: no module of this rank sees them again."""
        self._copies.clear()

    def __call__(self, carried: Carried) -> Any:
        """Returns the copy that the rank's modules share."""
        if carried.index not in self._copies:
            self._copies[carried.index] = carried.copy()
        return self._copies[carried.index]


def holds_tensors(obj: Any, depth: int = 6) -> bool:
    """Whether an object holds tensors in its attributes, or in containers and objects in them."""
    if isinstance(obj, torch.Tensor):
        return True
    if depth == 0 or isinstance(obj, type | torch.nn.Module):
        return False
    if isinstance(obj, Mapping):
        return any(holds_tensors(item, depth - 1) for item in obj.values())
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return any(holds_tensors(item, depth - 1) for item in obj)
    return any(holds_tensors(item, depth - 1) for item in getattr(obj, "__dict__", {}).values())
