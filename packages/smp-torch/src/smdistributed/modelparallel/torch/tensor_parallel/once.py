"""Backward passes that are part of a graph themselves (``create_graph=True``), or are not.

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

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Returns the backward pass of a function, which refuses to be part of a graph.

    Raises:
        UnsupportedError: when it runs with ``create_graph=True``.
    """
    return differentiated_by(lambda *_: _refuse())(backward)


def differentiated_by(again: Backward) -> Callable[[Backward], Backward]:
    """Returns what makes a backward pass of a function, which is computed without a graph.

    Args:
        again: computes the same where it is part of a graph, with functions that have one.
    """

    def made(backward: Backward) -> Backward:
        compute = computed_without_gradients(backward)

        @functools.wraps(backward)
        def chosen(ctx: Any, *gradients: Any) -> Any:
            return (again if torch.is_grad_enabled() else compute)(ctx, *gradients)

        return chosen

    return made


def no_further(value: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns a gradient that refuses to be differentiated itself.

    Args:
        value: of it, without a graph.
        gradient: that it was computed from.
    """
    if value is None:
        return None
    made: torch.Tensor = _NoFurther.apply(value, gradient)  # type: ignore[no-untyped-call]
    return made


class _NoFurther(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _refuse()


def _refuse() -> None:
    raise UnsupportedError(
        "create_graph=True asks for gradients that can be differentiated, which those of "
        "parameters that tensor parallelism has split cannot, nor those that go through some split "
        "modules. Leave it out, or keep the modules of this loss whole, by "
        "smp.set_tensor_parallelism(module, enabled=False) before smp.DistributedModel."
    )
