"""The modules that ``auto=True`` has slices of: linear maps, and torch's attention."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of Transformers: a linear map whose weight is (in, out)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def is_map(module: nn.Module) -> bool:
    """Whether a module is a linear map; subclasses may compute something else."""
    return type(module) is nn.Linear or is_transposed(module)


def is_attention(module: nn.Module) -> bool:
    """Whether a module is torch's attention, which reads its weights by itself."""
    return type(module) is nn.MultiheadAttention


def number_of_maps(module: nn.Module) -> int:
    """Returns how many linear maps a module has in it; an attention counts as two."""
    return sum(is_map(each) + 2 * is_attention(each) for each in module.modules())


def sizes_of(linear: Any) -> tuple[int, int]:
    """Returns how many channels a linear map takes, and how many it gives."""
    outputs, inputs = linear.weight.shape
    return (outputs, inputs) if is_transposed(linear) else (inputs, outputs)
