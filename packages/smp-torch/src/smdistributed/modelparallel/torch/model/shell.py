"""What ``model.module`` gives."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModuleShell(nn.Module):
    """The thin wrapper that ``model.module`` gives; unknown attributes are the user's model's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model."""
        return self.module(*args, **kwargs)
