"""The exchanges of a module that is called once for each rank of its group, in *lanes*.

Lane ``r`` is the call of rank ``r``, with what that rank has given, on every rank: each computes
its slices of all calls. Sizes may differ between lanes. With a prescaled batch all ranks make the
same call, which is the only lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import in_memory
from smdistributed.modelparallel.torch.tensor_parallel.exchange import (
    enter,
    leave,
    mark,
    meet_again,
    to_examples,
)
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import no_view
from smdistributed.modelparallel.torch.tensor_parallel.group import Handle, TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.once import differentiated_by

Shapes = tuple[tuple[int, ...], ...]


@run_as_written
def to_lanes(group: TensorGroup, tensor: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Gives every rank what each rank has for its call; gradients are summed.

    Args:
        group: the ranks.
        tensor: of the own call.
        shapes: of this tensor in each call.
    """
    if group.is_prescaled:
        return [enter(group, tensor, [tensor.shape[0]] if tensor.dim() else [1])]
    found: Any = _ToLanes.apply(tensor, group.handle, shapes)  # type: ignore[no-untyped-call]
    group.exchanged(found[0])
    return list(found)


@run_as_written
def summed(group: TensorGroup, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the result of the own call, of which every rank has a share of the sum."""
    if group.is_prescaled:
        return leave(group, lanes[0], [])
    found: torch.Tensor = _Summed.apply(group.handle, *lanes)  # type: ignore[no-untyped-call]
    return group.exchanged(found)


@run_as_written
def joined(group: TensorGroup, lanes: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Returns the result of the own call, of which every rank has a slice along a dim."""
    if group.is_prescaled:
        return to_examples(group, lanes[0].movedim(dim, -1), []).movedim(-1, dim)
    found: torch.Tensor = _Joined.apply(group.handle, dim, *lanes)  # type: ignore[no-untyped-call]
    return group.exchanged(found)


def _gathered(
    collectives: Collectives, tensor: torch.Tensor, shapes: Shapes
) -> tuple[torch.Tensor, ...]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if not sum(sizes):
        return tuple(tensor.new_empty(shape) for shape in shapes)
    is_bool = tensor.dtype == torch.bool
    flat = tensor.contiguous().view(-1)
    together = collectives.gather(flat.view(torch.uint8) if is_bool else flat, sizes)
    parts = torch.split(together.view(torch.bool) if is_bool else together, sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _scattered(collectives: Collectives, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = [each.numel() for each in lanes]
    own = lanes[collectives.rank]
    if not sum(sizes):
        return own.clone()
    # As they lie in memory, which dropout goes by.
    flat = [each.permute(in_memory(each)).reshape(-1).contiguous() for each in lanes]
    total = collectives.sum_parts(flat)
    order = in_memory(own)
    back = [order.index(dim) for dim in range(own.dim())]
    return no_view(total.view([own.shape[dim] for dim in order]).permute(back))


def _to_lanes_again(ctx: Any, *gradients: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _Summed.apply(ctx.handle, *gradients)  # type: ignore[no-untyped-call]
    return ctx.handle().exchanged(made, in_backward=True), None, None


def _summed_again(ctx: Any, gradient: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _ToLanes.apply(gradient, ctx.handle, ctx.shapes)  # type: ignore[no-untyped-call]
    ctx.handle().exchanged(made[0], in_backward=True)
    return None, *made


def _joined_again(ctx: Any, gradient: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _Parted.apply(ctx.handle, ctx.dim, ctx.shapes, gradient)  # type: ignore[no-untyped-call]
    ctx.handle().exchanged(made[0], in_backward=True)
    return None, None, *made


def _parted_again(ctx: Any, *gradients: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _Joined.apply(ctx.handle, ctx.dim, *gradients)  # type: ignore[no-untyped-call]
    return None, None, None, ctx.handle().exchanged(made, in_backward=True)


class _ToLanes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle, shapes: Shapes) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.collectives = handle, handle().collectives
        return _gathered(ctx.collectives, tensor, shapes)

    @staticmethod
    @differentiated_by(_to_lanes_again)
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        meet_again(ctx)
        return _scattered(ctx.collectives, gradients), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, *lanes: torch.Tensor) -> torch.Tensor:
        mark(ctx, lanes[0])
        ctx.handle, ctx.collectives = handle, handle().collectives
        ctx.shapes = tuple(tuple(each.shape) for each in lanes)
        return _scattered(ctx.collectives, lanes)

    @staticmethod
    @differentiated_by(_summed_again)
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return None, *_gathered(ctx.collectives, gradient, ctx.shapes)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, dim: int, *lanes: torch.Tensor) -> torch.Tensor:
        mark(ctx, lanes[0])
        ctx.handle, ctx.collectives, ctx.dim = handle, handle().collectives, dim
        ctx.shapes = [each.shape for each in lanes]
        return _side_by_side(ctx.collectives, lanes, dim)

    @staticmethod
    @differentiated_by(_joined_again)
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return None, None, *_parted(ctx.collectives, gradient, ctx.dim, ctx.shapes)


class _Parted(torch.autograd.Function):
    """The other way: the own call's, of which every rank gets its slice in its lane."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, dim: int, shapes: Any, tensor: torch.Tensor) -> Any:
        mark(ctx, tensor)
        ctx.handle, ctx.collectives, ctx.dim = handle, handle().collectives, dim
        return tuple(_parted(ctx.collectives, tensor, dim, shapes))

    @staticmethod
    @differentiated_by(_parted_again)
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        meet_again(ctx)
        return None, None, None, _side_by_side(ctx.collectives, gradients, ctx.dim)


def _side_by_side(
    collectives: Collectives, lanes: Sequence[torch.Tensor], dim: int
) -> torch.Tensor:
    own = lanes[collectives.rank].shape
    return torch.cat(collectives.swap(lanes, [own] * collectives.size), dim=dim)


def _parted(
    collectives: Collectives, tensor: torch.Tensor, dim: int, shapes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    return collectives.swap(tensor.chunk(collectives.size, dim=dim), shapes)
