"""Layers of PyTorch, beyond its public API."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_METHODS = {kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


#: What packs and unpacks sequences: gives sizes on the host, beside numbers, and reads them there.
GIVING_SIZES = {torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence}


def convolves_as_torch(layer: Any) -> bool:
    """Whether a layer that has the forward of torch's convolutions convolves as they do."""
    return type(layer)._conv_forward in _METHODS and "_conv_forward" not in vars(layer)


def all_modules_are_hooked() -> bool:
    """Whether something runs in the calls of all modules there are."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
