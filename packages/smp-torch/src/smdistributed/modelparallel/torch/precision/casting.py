"""What half precision does to a model: its tensors are cast once, its inputs at each call.

Outputs stay in half precision, so a loss is computed in it unless the script says otherwise.

Source: model-parallel-extended-features-pytorch-fp16.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.torch.building.delayed_parameters import DelayedParameters
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule
from smdistributed.modelparallel.torch.tensors.nested import map_tensors


def half_type(config: Config) -> torch.dtype | None:
    """Returns the type that models are trained in; None where they stay as they are."""
    if config.fp16:
        return torch.float16
    return torch.bfloat16 if config.bf16 else None


def cast_model(config: Config, module: nn.Module, delayed: DelayedParameters) -> None:
    """Casts the floating-point parameters and buffers that the configuration wants in half.

    They stay the same Python objects, so optimizers made before keep them.

    Args:
        config: ``fp16`` or ``bf16`` concern the whole model; ``fp16_params`` alone concerns what
            distributed modules hold.
        module: the model.
        delayed: the parameters that have no values yet; they are cast when they get them.
    """
    dtype = half_type(config)
    if dtype is not None:
        _cast([module], dtype, delayed)
    elif config.fp16_params:
        distributed = [each for each in module.modules() if isinstance(each, DistributedModule)]
        _cast(distributed, torch.float16, delayed)


def cast_inputs(structure: Any, dtype: torch.dtype) -> Any:
    """Returns arguments of a model with floating-point tensors in its type; others stay."""

    def of_one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(structure, of_one)


def _cast(modules: Iterable[nn.Module], dtype: torch.dtype, delayed: DelayedParameters) -> None:
    tensors = {
        id(tensor): tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_floating_point() and tensor.dtype is not dtype
    }
    waiting = [tensor for tensor in tensors.values() if delayed.holds(tensor)]
    delayed.cast(waiting, dtype)
    for tensor in tensors.values():
        if tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)
