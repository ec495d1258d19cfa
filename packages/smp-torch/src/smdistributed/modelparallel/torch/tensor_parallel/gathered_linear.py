"""Linear maps with split weights.

A slice of a weight sees the examples of all ranks of its group, each of which counts by its own
loss; its gradient is the mean over the ranks, as that of any parameter is. So the gradients that
are made here are divided by the number of ranks, within the product that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.collectives.shapes import is_fake
from smdistributed.modelparallel.torch.tensor_parallel.exchange import enter
from smdistributed.modelparallel.torch.tensor_parallel.group import Handle, TensorGroup


def gathered_linear(
    group: TensorGroup,
    tensor: torch.Tensor,
    sizes: Sizes,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Applies linear maps, split along outputs, to the examples of all ranks, as one product.

    Shape: ``(sizes[rank], ..., in)``; returns ``(sum(sizes), ..., sum of the outputs)``.

    Args:
        group: the ranks.
        tensor: the own examples.
        sizes: the examples of each rank.
        weights: the slices of the maps, ``(out, in)`` each.
        biases: of the maps; all or none.
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    given = [each for each in biases if each is not None]
    bias = None if not given else given[0] if len(given) == 1 else torch.cat(given)
    if group.size == 1 or group.is_prescaled or group.keeps_gathered:
        return sliced_linear(group, enter(group, tensor, sizes), weight, bias)
    return _apply(tensor, weight, bias, group.share_of_gradient, group.handle, sizes)


def sliced_linear(
    group: TensorGroup,
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Applies a linear map of which weight and bias are slices to the examples of all ranks.

    Shape: ``(..., in)`` to ``(..., out)``.
    """
    if group.share_of_gradient == 1:
        return F.linear(tensor, weight, bias)
    return _apply(tensor, weight, bias, group.share_of_gradient, None, None)


def used_slice(group: TensorGroup, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a slice for any other use by the examples of all ranks."""
    if group.share_of_gradient == 1:
        return parameter
    used: torch.Tensor = _Shared.apply(  # type: ignore[no-untyped-call]
        parameter, group.share_of_gradient
    )
    return used


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that autograd's functions may return to code that changes it in place.

    It has the memory of the given one, which is not to be used any more.
    """
    if is_fake(tensor):
        return tensor.clone()
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _apply(*args: Any) -> torch.Tensor:
    result: torch.Tensor = _SlicedLinear.apply(*args)  # type: ignore[no-untyped-call]
    return result


class _SlicedLinear(torch.autograd.Function):
    """With a group it gathers, keeps its own examples only, and gathers again."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        share: float,
        handle: Handle | None,
        sizes: Sizes | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(tensor, weight, bias)
        collectives = None if handle is None else handle().collectives
        ctx.share, ctx.collectives, ctx.sizes = share, collectives, sizes
        if collectives is not None and sizes is not None:
            tensor = collectives.gather(tensor, sizes)
        return no_view(F.linear(tensor, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, weight, bias = ctx.saved_tensors
        collectives, sizes = ctx.collectives, ctx.sizes
        of_tensor = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            # Under autocast the product, and with it its gradient, has another type.
            of_tensor = gradient @ weight.to(gradient.dtype)
            if collectives is not None:
                of_tensor = collectives.scatter_sum(of_tensor, sizes)
            of_tensor = of_tensor.to(tensor.dtype)
        flat = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            given = tensor if collectives is None else collectives.gather(tensor, sizes)
            inputs = given.to(gradient.dtype).flatten(0, -2)
            nothing = flat.new_zeros(())
            product = torch.addmm(nothing, flat.t(), inputs, beta=0, alpha=ctx.share)
            of_weight = product.to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = (flat.sum(0) * ctx.share).to(bias.dtype)
        return of_tensor, of_weight, of_bias, None, None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.share, None
