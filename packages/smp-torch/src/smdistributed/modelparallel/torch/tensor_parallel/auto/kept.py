"""What modules keep of a call in their attributes, and copies of modules that keep some.

Of an activation that a module keeps, as for a plot or a penalty, each rank would have the slice of
some rank's call, and who reads it would not know: such a module stays whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_T = TypeVar("_T")
Tensors = Mapping[str, torch.Tensor]


def tensors_kept_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors in a module's attributes, parameters and buffers left out, by place."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def look(value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs:
                look(each, f"{place}[{key!r}]")

    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if attribute not in _OF_MODULES:
                look(value, f"{name}.{attribute}".lstrip("."))
    return found


_OF_MODULES = frozenset(vars(nn.Module()))


def activation_in(kept: Tensors) -> str | None:
    """Returns where a module keeps what has a graph; None if nowhere."""
    return next((place for place, each in kept.items() if not each.is_leaf), None)


def copied(obj: _T, memo: dict[int, Any]) -> _T:
    """Returns a deep copy, also of what has activations in it; their graphs are left out.

    Args:
        obj: what to copy.
        memo: copies that there are, by id.
    """
    with _WithoutGraphs():
        return copy.deepcopy(obj, memo)


class _WithoutGraphs(TorchFunctionMode):
    """Copies activations, of which torch copies leaves alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            made = args[0].detach().clone()
            args[1][id(args[0])] = made
            return made
        return func(*args, **(kwargs or {}))
