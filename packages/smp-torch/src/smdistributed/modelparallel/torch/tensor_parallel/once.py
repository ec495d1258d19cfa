"""Backward passes that are not differentiated themselves.

PyTorch's own ``once_differentiable`` takes a backward pass for a constant where the gradient that
it is given needs none, whatever else it computes with: a gradient penalty would lack the part of a
split weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as computed_without_gradients

from smdistributed.modelparallel.common.errors import UnsupportedError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the backward pass of a function, which refuses to be part of a graph.

    Raises:
        UnsupportedError: when it runs with ``create_graph=True``.
    """
    compute = computed_without_gradients(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True asks for gradients that can be differentiated, which do not go "
                "through modules that tensor parallelism has split. Leave it out, or keep the "
                "modules of this loss whole, by smp.set_tensor_parallelism(module, enabled=False) "
                "before smp.DistributedModel."
            )
        return compute(ctx, *gradients)

    return checked
