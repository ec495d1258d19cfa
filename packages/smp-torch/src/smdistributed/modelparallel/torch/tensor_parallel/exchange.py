"""The exchanges of a distributed module, as functions that can be differentiated.

A rank has either its *own examples* with all channels, or *all examples* of its group with its own
share of channels (heads, or neurons of an inner layer). Each function goes from one to the other.
With a prescaled batch own examples are all examples, the same on every rank; the functions are then
those that keep equal what is equal: a sum, or nothing.

Shape: examples along dim 0, channels along the last; ``sizes`` are the examples of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes
from smdistributed.modelparallel.torch.compat.between import atomic
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.group import Handle, TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.once import (
    Backward,
    differentiated_by,
    once_differentiable,
)


def enter(group: TensorGroup, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Own examples, all channels -> all examples, all channels; gradients are summed."""
    if group.size == 1:
        return tensor
    tensor = group.like_others(tensor)
    if group.is_prescaled:
        return _apply(group, _Copy, tensor)
    return _apply(group, _Gather, tensor, sizes)


def leave(group: TensorGroup, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """All examples, a share of a sum -> own examples, the sum."""
    if group.size == 1:
        return tensor
    if group.is_prescaled:
        return _apply(group, _Sum, tensor)
    return _apply(group, _Scatter, tensor, sizes)


def to_channels(group: TensorGroup, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Own examples, all channels -> all examples, own channels."""
    if group.size == 1:
        return tensor
    tensor = group.like_others(tensor)
    if group.is_prescaled:
        return _apply(group, _TakeChannels, tensor)
    return _apply(group, _ToChannels, tensor, sizes)


def to_examples(group: TensorGroup, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """All examples, own channels -> own examples, all channels."""
    if group.size == 1:
        return tensor
    if group.is_prescaled:
        return _apply(group, _JoinChannels, tensor)
    return _apply(group, _ToExamples, tensor, sizes)


def whole(group: TensorGroup, slice_: torch.Tensor) -> torch.Tensor:
    """The own slice of a weight along the last dim -> the weight."""
    if group.size == 1:
        return slice_
    return _apply(group, _Whole, slice_)


@run_as_written
def moved(
    group: TensorGroup, tensors: Sequence[torch.Tensor], sizes: Sequence[tuple[Sizes, Sizes]]
) -> list[torch.Tensor]:
    """Gives each rank some rows of own tensors, and returns those that the ranks gave this one.

    Gradients go back the same way, those of all tensors in one pass; zeros where there are none.

    Args:
        group: the ranks, two or more.
        tensors: with rows along dim 0, in the order of the ranks that get them.
        sizes: of each tensor, how many rows each rank gets, and how many each gives.
    """
    made = _Moved.apply(group.handle, sizes, *tensors)  # type: ignore[no-untyped-call]
    group.exchanged(made[0])
    return list(made)


def rows_moved(
    collectives: Collectives, tensor: torch.Tensor, given: Sizes, taken: Sizes
) -> torch.Tensor:
    """Gives each rank some rows of a tensor, without a graph; see ``moved``."""
    rest = tensor.shape[1:]
    parts = collectives.swap(
        torch.split(tensor.contiguous(), list(given)), [torch.Size((n, *rest)) for n in taken]
    )
    return torch.cat(parts)


@atomic
@run_as_written
def gathered(group: TensorGroup, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Own examples -> all examples, of what needs no gradient, such as tokens."""
    if group.size == 1 or group.is_prescaled:
        return tensor
    return group.collectives.gather(tensor, sizes)


@run_as_written
def _apply(group: TensorGroup, function: Any, tensor: torch.Tensor, *sizes: Sizes) -> torch.Tensor:
    return group.exchanged(function.apply(tensor, group.handle, *sizes))


def _again_by(name: str) -> Callable[[Backward], Backward]:
    """Returns what has a backward pass be another exchange where that is part of a graph.

    Args:
        name: of the function that does the same.
    """

    def again(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        sizes = () if ctx.sizes is None else (ctx.sizes,)
        group = ctx.handle()
        result = globals()[name].apply(gradient, ctx.handle, *sizes)
        return group.exchanged(result, in_backward=True), None, *(None for _ in sizes)

    return differentiated_by(again)


def _joined(collectives: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shares of all ranks side by side along the last dim."""
    parts = collectives.gather(tensor.contiguous().unsqueeze(0), [1] * collectives.size)
    return torch.cat(parts.unbind(), dim=-1)


def _share(collectives: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the own share along the last dim."""
    return tensor.chunk(collectives.size, dim=-1)[collectives.rank].contiguous()


def _channels(collectives: Collectives, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    parts = tensor.chunk(collectives.size, dim=-1)
    shape = parts[0].shape
    shapes = [torch.Size((size, *shape[1:])) for size in sizes]
    return torch.cat(collectives.swap(parts, shapes))


def _examples(collectives: Collectives, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    parts = torch.split(tensor, list(sizes))
    shape = parts[collectives.rank].shape
    return torch.cat(collectives.swap(parts, [shape] * collectives.size), dim=-1)


def mark(ctx: Any, tensor: torch.Tensor) -> None:
    """Saves a tensor, of no size, for ``meet_again``."""
    ctx.save_for_backward(tensor.new_empty(0))


def meet_again(ctx: Any) -> None:
    """Has activation checkpointing compute again, before the first exchange, what this is part of.

    That calls modules, on all ranks. Else it would come with the first tensor that is needed, which
    ranks may find sooner or later: those whose gradients are zeros begin at an exchange.
    """
    _ = ctx.saved_tensors


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle, sizes: Sizes) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, sizes
        ctx.collectives = handle().collectives
        return ctx.collectives.gather(tensor, sizes)

    @staticmethod
    @_again_by("_Scatter")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return ctx.collectives.scatter_sum(gradient, ctx.sizes), None, None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, sizes: Any, *tensors: Any) -> Any:
        mark(ctx, tensors[0])
        ctx.collectives, ctx.sizes = handle().collectives, sizes
        pairs = zip(tensors, sizes, strict=True)
        return tuple(rows_moved(ctx.collectives, each, *rows) for each, rows in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        meet_again(ctx)
        pairs = zip(gradients, ctx.sizes, strict=True)
        back = [rows_moved(ctx.collectives, each, *rows[::-1]) for each, rows in pairs]
        return None, None, *back


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle, sizes: Sizes) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, sizes
        ctx.collectives = handle().collectives
        return ctx.collectives.scatter_sum(tensor, sizes)

    @staticmethod
    @_again_by("_Gather")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return ctx.collectives.gather(gradient, ctx.sizes), None, None


class _ToChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle, sizes: Sizes) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, sizes
        ctx.collectives = handle().collectives
        return _channels(ctx.collectives, tensor, sizes)

    @staticmethod
    @_again_by("_ToExamples")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return _examples(ctx.collectives, gradient, ctx.sizes), None, None


class _ToExamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle, sizes: Sizes) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, sizes
        ctx.collectives = handle().collectives
        return _examples(ctx.collectives, tensor, sizes)

    @staticmethod
    @_again_by("_ToChannels")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return _channels(ctx.collectives, gradient, ctx.sizes), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, None
        ctx.collectives = handle().collectives
        return tensor.view_as(tensor)

    @staticmethod
    @_again_by("_Sum")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return ctx.collectives.sum(gradient), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, None
        return handle().collectives.sum(tensor)

    @staticmethod
    @_again_by("_Copy")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return gradient, None


class _TakeChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, None
        ctx.collectives = handle().collectives
        return _share(ctx.collectives, tensor)

    @staticmethod
    @_again_by("_JoinChannels")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return _joined(ctx.collectives, gradient), None


class _JoinChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.sizes = handle, None
        ctx.collectives = handle().collectives
        return _joined(ctx.collectives, tensor)

    @staticmethod
    @_again_by("_TakeChannels")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        # Every rank has the same gradient of the same examples.
        return _share(ctx.collectives, gradient), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slice_: torch.Tensor, handle: Handle) -> Any:
        mark(ctx, slice_)
        ctx.group = handle()
        return _joined(ctx.group.collectives, slice_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        collectives = ctx.group.collectives
        if ctx.group.is_prescaled:
            return _share(collectives, gradient), None
        parts = torch.stack(gradient.chunk(collectives.size, dim=-1))
        total = collectives.scatter_sum(parts, [1] * collectives.size)[0]
        return total * ctx.group.share_of_gradient, None
