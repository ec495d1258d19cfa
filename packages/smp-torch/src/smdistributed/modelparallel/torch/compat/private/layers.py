"""Layers of PyTorch, beyond its public API."""

from __future__ import annotations

from typing import Any

from torch import nn

_METHODS = {kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


def convolves_as_torch(layer: Any) -> bool:
    """Whether a layer that has the forward of torch's convolutions convolves as they do."""
    return type(layer)._conv_forward in _METHODS and "_conv_forward" not in vars(layer)
