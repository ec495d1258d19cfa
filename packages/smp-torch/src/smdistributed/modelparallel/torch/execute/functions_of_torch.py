"""Functions of PyTorch, which a script may replace by its own: ``nn.functional.gelu = faster``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.record.identities import Identities
from smdistributed.modelparallel.torch.record.reach import is_users


class FunctionsOfTorch:
    """Those of its namespaces, and of its classes of some modules.

    Args:
        modules: whose classes count.

    Attributes:
        of_others: what a script has put in their places.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = dict.fromkeys(kind for each in modules for kind in type(each).__mro__)
        spaces: list[Any] = [vars(each) for each in (torch, nn.functional, torch.Tensor)]
        spaces += [vars(kind) for kind in kinds if kind.__module__.partition(".")[0] == "torch"]
        entries = [
            (space, name) for space in spaces for name, value in space.items() if callable(value)
        ]
        found = [space[name] for space, name in entries]
        # What is built in has no module.
        of_modules = [getattr(each, "__module__", None) or "builtins" for each in found]
        self.of_others = list(itertools.compress(found, map(is_users, of_modules)))
        self._identities = Identities(entries=entries)

    def are_current(self) -> bool:
        """Whether all are the functions that they were."""
        return self._identities.are_current()
