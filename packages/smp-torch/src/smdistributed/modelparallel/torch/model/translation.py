"""The state of a model in the form of the modules that distributed ones stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    StateTranslation,
)

State = Mapping[str, Any]


class ModelTranslation:
    """Translates the whole state of a model, of which some modules stand for others.

    Args:
        model: the user's model, with distributed modules in it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pairs: dict[str, tuple[StateTranslation, StateTranslation]] = {
            f"{name}." if name else "": module.translations
            for name, module in model.named_modules()
            if isinstance(module, DistributedModule) and module.translations is not None
        }
        modules = {prefix: model.get_submodule(prefix.rstrip(".")) for prefix in self._pairs}
        self._parameters = {
            prefix: {name for name, _ in module.named_parameters(remove_duplicate=False)}
            for prefix, module in modules.items()
        }
        self._buffers = {
            prefix: {name for name, _ in module.named_buffers(remove_duplicate=False)}
            for prefix, module in modules.items()
        }

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def to_theirs(self, state: State) -> dict[str, Any]:
        """Returns a state in the form of the modules that were replaced; one that has it stays."""
        return self._translated(state, 0)

    def to_ours(self, state: State) -> dict[str, Any]:
        """Returns a state in that of the distributed modules."""
        return self._translated(state, 1)

    @staticmethod
    def is_ours(state: State, names: Iterable[str]) -> bool:
        """Whether a state has the names of the model as it is, which are given."""
        return set(names) <= set(state)

    def _translated(self, state: State, direction: int) -> dict[str, Any]:
        found: dict[str, Any] = dict(state)
        for prefix, pair in self._pairs.items():
            inside = {name: each for name, each in found.items() if name.startswith(prefix)}
            weights: dict[str, torch.Tensor] = {
                name[len(prefix) :]: each
                for name, each in inside.items()
                if isinstance(each, torch.Tensor)
            }
            own, buffers = self._parameters[prefix], self._buffers[prefix]
            is_theirs = own - weights.keys() and weights.keys() - own - buffers
            if direction == 0 and is_theirs:
                continue
            outside = {name: each for name, each in found.items() if name not in inside}
            translated = pair[direction](weights)
            found = {**outside, **{f"{prefix}{name}": each for name, each in translated.items()}}
        return found
