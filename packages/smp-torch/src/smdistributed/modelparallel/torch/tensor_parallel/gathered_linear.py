"""Linear maps with split weights.

A slice of a weight sees the examples of all ranks of its group, each of which counts by its own
loss; its gradient is the mean over the ranks, as that of any parameter is. So the gradients that
are made here are divided by the number of ranks, within the product that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.collectives.shapes import is_fake
from smdistributed.modelparallel.torch.compat.fused import fused as fused_on_gpus
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.exchange import enter
from smdistributed.modelparallel.torch.tensor_parallel.group import Handle, TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.once import (
    differentiated_by,
    no_further,
)


class Together:
    """Adds up the gradients of one weight over several products, within the last of them.

    All of the products must be differentiated when one is.
    """

    #: Each pass has its own, see ``tape``.
    lives_for_a_pass = True

    def __init__(self) -> None:
        self._products = 0
        self._left = 0
        self._total: torch.Tensor | None = None

    def count(self) -> None:
        """Takes note of a product."""
        self._products += 1

    def add(
        self, gradient: torch.Tensor, inputs: torch.Tensor, share: float
    ) -> torch.Tensor | None:
        """Takes the gradient of a product; returns the sum of all with the last one.

        Args:
            gradient: of what a product made, ``(examples, out)``.
            inputs: that it had, ``(examples, in)``.
            share: what the gradient counts for.
        """
        if not self._left:
            self._left = self._products
        self._left -= 1
        if self._total is None:
            total = _of_weight(gradient, inputs, share)
        else:
            total = self._total.addmm_(gradient.t(), inputs.conj(), alpha=share)
        self._total = total if self._left else None
        return None if self._left else total


class Map(NamedTuple):
    """A slice of a linear map.

    Attributes:
        weight: ``(out, in)``.
        bias: if there is one.
        together: sums the gradients of its weight; None: autograd does.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    together: Together | None = None


@dataclass(frozen=True)
class Entered:
    """The examples of all ranks, that a linear map is applied to.

    Attributes:
        everyones: the gathered tensor.
        own: the part of this rank, if its backward pass gathers again; None if it keeps all.
        sizes: the examples of each rank.
    """

    everyones: torch.Tensor
    own: torch.Tensor | None
    sizes: Sizes


def entered(
    group: TensorGroup,
    tensor: torch.Tensor,
    sizes: Sizes,
    everyones: torch.Tensor | None = None,
) -> Entered:
    """Gathers the examples of all ranks for linear maps that are split along outputs.

    Args:
        group: the ranks.
        tensor: the own examples, ``(sizes[rank], ...)``.
        sizes: the examples of each rank.
        everyones: what has been gathered, if it has.
    """
    keeps_all = group.size == 1 or group.is_prescaled or group.keeps_gathered
    own = None if keeps_all else tensor.detach()
    return Entered(enter(group, tensor, sizes) if everyones is None else everyones, own, sizes)


def entered_linear(group: TensorGroup, given: Entered, map_: Map) -> torch.Tensor:
    """Applies a linear map, split along outputs, to the examples of all ranks.

    Shape: ``(sum(sizes), ..., out)``.
    """
    if given.own is None:
        return sliced_linear(group, given.everyones, *map_)
    share, handle = group.share_of_gradient, group.handle
    return group.exchanged(_apply(given.everyones, *map_, share, given.own, handle, given.sizes))


def fused(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Map:
    """Returns linear maps as one, whose outputs lie side by side.

    Args:
        weights: the slices of the maps, ``(out, in)`` each.
        biases: of the maps; all or none.
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    given = [each for each in biases if each is not None]
    return Map(weight, None if not given else given[0] if len(given) == 1 else torch.cat(given))


def sliced_linear(
    group: TensorGroup,
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    together: Together | None = None,
) -> torch.Tensor:
    """Applies a linear map of which weight and bias are slices to the examples of all ranks.

    Shape: ``(..., in)`` to ``(..., out)``.
    """
    if group.share_of_gradient == 1:
        return F.linear(tensor, weight, bias)
    if torch.compiler.is_compiling():
        assert together is None
        made: torch.Tensor = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
            tensor, weight, bias, group.share_of_gradient
        )
        return made
    return _apply(tensor, weight, bias, together, group.share_of_gradient)


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


@run_as_written
def _apply(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    together: Together | None,
    share: float,
    own: torch.Tensor | None = None,
    handle: Handle | None = None,
    sizes: Sizes | None = None,
) -> torch.Tensor:
    result: torch.Tensor = _SlicedLinear.apply(  # type: ignore[no-untyped-call]
        tensor, weight, bias, together, share, own, handle, sizes
    )
    return result


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _of_weight(gradient: torch.Tensor, inputs: torch.Tensor, share: float) -> torch.Tensor:
    nothing = gradient.new_zeros(())
    return torch.addmm(nothing, gradient.t(), inputs.conj(), beta=0, alpha=share)


@fused_on_gpus
def _of_bias(gradient: torch.Tensor, share: float, dtype: torch.dtype) -> torch.Tensor:
    return (gradient.sum(0) * share).to(dtype)


def _of_slices_again(ctx: Any, gradient: torch.Tensor) -> Any:
    """Computes the gradients of a product where they have a graph, as an input's may.

    What a weight counts for in the product that gives it is what it counts for in the first one.
    """
    _, weight, _ = ctx.saved_tensors
    with torch.no_grad():
        _, of_weight, of_bias, *rest = _SlicedLinear.gradients(ctx, gradient, of_input=False)
    of_tensor = None
    if ctx.needs_input_grad[0]:
        # One that was frozen in the first product is in this one, whatever it is by now.
        used = weight if ctx.needs_input_grad[1] else weight.detach()
        turned = used.conj().to(gradient.dtype).t()
        of_tensor = _apply(gradient, turned, None, None, ctx.share).to(ctx.dtype)
    return of_tensor, no_further(of_weight, gradient), no_further(of_bias, gradient), *rest


class _SlicedLinear(torch.autograd.Function):
    """With a group it keeps the own examples only, and gathers all again."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        together: Together | None,
        share: float,
        own: torch.Tensor | None,
        handle: Handle | None,
        sizes: Sizes | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(tensor if own is None else own, weight, bias)
        ctx.group = None if handle is None else handle()
        ctx.share, ctx.sizes, ctx.dtype = share, sizes, tensor.dtype
        ctx.together = together
        if together is not None:
            together.count()
        return no_view(F.linear(tensor, weight, bias))

    @staticmethod
    @differentiated_by(_of_slices_again)
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _SlicedLinear.gradients(ctx, gradient, of_input=ctx.needs_input_grad[0])

    @staticmethod
    def gradients(ctx: Any, gradient: torch.Tensor, *, of_input: bool) -> Any:
        """Returns those of what ``forward`` was given."""
        tensor, weight, bias = ctx.saved_tensors
        group: TensorGroup | None = ctx.group
        mark = of_tensor = of_weight = of_bias = None
        if group is not None and ctx.needs_input_grad[1]:
            # Beside the product that follows.
            with group.stream.entered(tensor):
                tensor = group.collectives.gather(tensor, ctx.sizes)
            mark = group.stream.mark()
        if of_input:
            # Under autocast the product, and with it its gradient, has another type.
            of_tensor = (gradient @ weight.conj().to(gradient.dtype)).to(ctx.dtype)
        flat = _rows(gradient)
        if ctx.needs_input_grad[1]:
            if group is not None:
                group.stream.wait(mark, [tensor])
            inputs = _rows(tensor.to(gradient.dtype))
            if ctx.together is None:
                of_weight = _of_weight(flat, inputs, ctx.share)
            else:
                of_weight = ctx.together.add(flat, inputs, ctx.share)
            of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = _of_bias(flat, ctx.share, bias.dtype)
        return of_tensor, of_weight, of_bias, None, None, None, None, None


class _CompiledLinear(torch.autograd.Function):
    """The same in what is compiled, where what it makes is fused with what comes before and after.

    (A compiler takes neither what looks at memory, as ``no_view``, nor ``once_differentiable``.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        share: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(tensor, weight, bias)
        ctx.share = share
        return F.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, weight, bias = ctx.saved_tensors
        of_tensor = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_tensor = (gradient @ weight.conj().to(gradient.dtype)).to(tensor.dtype)
        flat = _rows(gradient)
        if ctx.needs_input_grad[1]:
            inputs = _rows(tensor.to(gradient.dtype))
            of_weight = _of_weight(flat, inputs, ctx.share).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = (flat.sum(0) * ctx.share).to(bias.dtype)
        return of_tensor, of_weight, of_bias, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return parameter.view_as(parameter)

    @staticmethod
    @differentiated_by(lambda ctx, gradient: (no_further(gradient * ctx.share, gradient), None))
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.share, None
