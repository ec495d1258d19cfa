"""Functions of the user's that run once, at a moment in the life of a model."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class OnceHooks:
    """The hooks of one moment, in order of registration."""

    def __init__(self) -> None:
        # A handle refers to its registry weakly, which a plain dict does not allow.
        self._hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def add(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Takes a hook.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable; received {type(hook).__name__}.")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def run(self, model: Any, find_optimizer: Callable[[], Any]) -> None:
        """Runs each hook and forgets it.

        Args:
            model: which the hooks are for.
            find_optimizer: returns the optimizer of the model, or None.
        """
        for key in list(self._hooks):
            hook = self._hooks.pop(key)
            if len(inspect.signature(hook).parameters) >= 2:
                hook(model, find_optimizer())
            else:
                hook()
