"""Copies of a module with random weights, to try things with.

Weights are random, since those of a model may be zeros that hide a difference. The module that is
tried is a copy, which a template without memory can make at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.auto.kept import copied
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import is_attention, is_map

#: After so many random numbers those of a large weight repeat: to draw all takes minutes for a
#: large model. A prime, so that neither rows nor columns nor slices are alike.
_PERIOD = 1_000_003


class Template:
    """A module without the memory of its weights, to try things with.

    Args:
        module: to copy.
        value_of: gives a buffer its values where they are delayed.

    Attributes:
        linears: the linear maps in it, by name.
        attentions: torch's attentions in it, by name.
        shared: the names of modules in it that others have too.
    """

    def __init__(self, module: nn.Module, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.shared: set[str] = set()

        def shape_of(parameter: nn.Parameter) -> torch.Tensor:
            like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            return nn.Parameter(like, requires_grad=parameter.requires_grad)

        def kept(buffer: torch.Tensor) -> torch.Tensor:
            return value_of(buffer).detach().to("cpu", copy=True)

        self._module = copied_with(module, shape_of, kept)
        inner: dict[str, Any] = dict(self._module.named_modules())
        self.linears = {name: each for name, each in inner.items() if is_map(each)}
        self.attentions = {name: each for name, each in inner.items() if is_attention(each)}

    @property
    def module(self) -> nn.Module:
        """The copy, of which the parameters have no values."""
        return self._module

    def sizes(self) -> frozenset[int]:
        """Returns the sizes of its weights, and the whole numbers in its modules."""
        found = {size for each in self._module.parameters() for size in each.shape}
        for each in self._module.modules():
            found.update(value for value in vars(each).values() if type(value) is int)
        return frozenset(found)

    def without_values(self) -> nn.Module:
        """Returns a module whose tensors have no memory."""
        return copied_with(
            self._module, lambda each: each, lambda each: torch.empty_like(each, device="meta")
        )

    def made(self, draws: torch.Generator, dtype: torch.dtype) -> nn.Module:
        """Returns a module with random weights.

        Args:
            draws: gives them.
            dtype: of all that is a floating-point number.
        """
        noise = torch.empty(0)

        def of_dtype(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

        def values(parameter: nn.Parameter) -> torch.Tensor:
            nonlocal noise
            count = parameter.numel()
            if count <= _PERIOD:
                found = torch.randn(parameter.shape, generator=draws, dtype=dtype)
            else:
                if noise.numel() < _PERIOD + count:
                    some = torch.randn(_PERIOD, generator=draws, dtype=dtype)
                    noise = some.repeat(2 + count // _PERIOD)
                start = int(torch.randint(_PERIOD, (), generator=draws))
                found = noise[start : start + count].clone().view(parameter.shape)
            if parameter.dim() > 1:
                found /= math.sqrt(parameter.shape[-1])
            return nn.Parameter(found, requires_grad=parameter.requires_grad)

        return copied_with(self._module, values, of_dtype)


def copied_with(
    module: nn.Module,
    of_parameter: Callable[[nn.Parameter], torch.Tensor],
    of_buffer: Callable[[torch.Tensor], torch.Tensor],
) -> nn.Module:
    """Returns a copy of a module with other tensors, and the same configuration."""
    memo: dict[int, Any] = {id(each): of_parameter(each) for each in module.parameters()}
    memo.update((id(each), of_buffer(each)) for each in module.buffers())
    for inner in module.modules():
        for value in vars(inner).values():
            if type(value).__name__.endswith("Config"):
                memo[id(value)] = value
    return copied(module, memo)
