"""The exchanges of a module that is called once for each rank of its group, in *lanes*.

Lane ``r`` is the call of rank ``r``, with what that rank has given, on every rank: each computes
its slices of all calls. Sizes may differ between lanes. With a prescaled batch all ranks make the
same call, which is the only lane.

Of its own call a rank has everything at once, so it computes that first, with the very tensors that
it was given, while what the others have given comes. In the backward pass their calls are
differentiated first, as autograd goes the other way; what comes of that for their ranks travels
while the own call is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.streams import Mark
from smdistributed.modelparallel.torch.compat.between import atomic
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import in_memory
from smdistributed.modelparallel.torch.tensor_parallel.exchange import (
    leave,
    mark,
    meet_again,
    to_examples,
)
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import no_view
from smdistributed.modelparallel.torch.tensor_parallel.group import Handle, TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.once import differentiated_by

Shapes = tuple[tuple[int, ...], ...]


class _Way:
    """What of a tensor is on its way between the ranks, beside what computes.

    There, what the others have given; back, what they have found for the gradient of the own one.
    """

    #: Each pass has its own, see ``tape``.
    lives_for_a_pass = True

    def __init__(self) -> None:
        self._there: tuple[tuple[torch.Tensor, ...], Mark | None] = (), None
        self._back: tuple[torch.Tensor, Mark | None] | None = None

    def give(self, group: TensorGroup, tensor: torch.Tensor, shapes: Shapes) -> None:
        """Begins to give every rank what each has."""
        with group.stream.entered(tensor):
            everyones = _gathered(group.collectives, tensor, shapes)
        self._there = everyones, group.stream.mark()

    def others(self, group: TensorGroup) -> tuple[torch.Tensor, ...]:
        """Returns what the other ranks have given, as soon as it is there."""
        (everyones, mark), self._there = self._there, ((), None)
        group.stream.wait(mark, everyones)
        return everyones[: group.rank] + everyones[group.rank + 1 :]

    def give_back(self, group: TensorGroup, gradients: Sequence[torch.Tensor], own: Any) -> None:
        """Begins to give the other ranks what is theirs."""
        with group.stream.entered(*gradients):
            found = _given_back(group.collectives, gradients, own)
        self._back = found, group.stream.mark()

    def come_back(self, gradient: torch.Tensor) -> None:
        """Takes note of what has come without being waited for."""
        self._back = gradient, None

    def of_others(self, group: TensorGroup) -> torch.Tensor | None:
        """Returns what the others have found, as soon as it is there; None if they have nothing."""
        if self._back is None:
            return None
        (gradient, mark), self._back = self._back, None
        group.stream.wait(mark, [gradient])
        return gradient


@dataclass
class Travelling:
    """A tensor that ranks give each other for their calls.

    Attributes:
        shapes: of the tensor in each call.
        way: on which it is.
        token: for autograd, which goes by it.
    """

    shapes: Shapes
    way: _Way
    token: torch.Tensor


@run_as_written
def to_lanes(group: TensorGroup, tensor: torch.Tensor, shapes: Shapes) -> Travelling:
    """Begins to give every rank what each rank has for its call; see ``arrived``.

    What the others find for its gradient is added to that of the own call, which has the tensor.

    Args:
        group: the ranks.
        tensor: of the own call; it requires a gradient.
        shapes: of this tensor in each call.
    """
    way = _Way()
    token = _Given.apply(tensor, group.handle, way, shapes)  # type: ignore[no-untyped-call]
    return Travelling(shapes, way, token)


@run_as_written
def arrived(group: TensorGroup, tensor: Travelling) -> list[torch.Tensor]:
    """Returns a tensor for the calls of the other ranks, after the own has been computed."""
    found: Any = _Others.apply(  # type: ignore[no-untyped-call]
        tensor.token, group.handle, tensor.way, tensor.shapes
    )
    group.exchanged(found[0])
    return list(found)


@run_as_written
def constants_to_lanes(
    group: TensorGroup, tensors: Sequence[torch.Tensor], shapes: Sequence[Shapes]
) -> list[tuple[torch.Tensor, ...]]:
    """Gives every rank tensors without gradients, those of each tensor for all calls.

    They are there when what is given next has arrived.
    """
    made = _constants_to_lanes(group, tuple(shapes), *tensors)
    return [made[first : first + group.size] for first in range(0, len(made), group.size)]


@atomic
def _constants_to_lanes(
    group: TensorGroup, shapes: Sequence[Shapes], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    with group.stream.entered(*tensors):
        for tensor, theirs in zip(tensors, shapes, strict=True):
            found += _gathered(group.collectives, tensor, theirs)
        group.stream.used_before(found)
    return tuple(found)


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


@run_as_written
def averaged(group: TensorGroup, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the result of the own call, which is the mean of what all ranks have of it."""
    if lanes[0].dtype == torch.float16:  # the sum may be too large for it
        return summed(group, [each / group.size for each in lanes])
    return summed(group, lanes) / group.size


@run_as_written
def common(group: TensorGroup, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the result of the own call, which every rank has whole, from what they summed.

    It counts as the mean of what they have: each computes its share of the gradient.
    """
    if not lanes[group.rank].requires_grad:
        return lanes[group.rank]
    found: torch.Tensor = _Common.apply(group.handle, *lanes)  # type: ignore[no-untyped-call]
    return group.exchanged(found)


@run_as_written
def added_up(group: TensorGroup, share: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the shares of all ranks, in the middle of a call that all compute.

    The gradient of each share is the sum of what the ranks have of that of the sum.
    """
    found: torch.Tensor = _AddedUp.apply(share, group.handle)  # type: ignore[no-untyped-call]
    return found


def _gathered(
    collectives: Collectives, tensor: torch.Tensor, shapes: Shapes
) -> tuple[torch.Tensor, ...]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if not sum(sizes):
        return tuple(tensor.new_empty(shape) for shape in shapes)
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        together = collectives.gather(flat, sizes)
    else:  # as bytes: not every library knows every type
        bytes_ = [size * tensor.element_size() for size in sizes]
        together = collectives.gather(flat.view(torch.uint8), bytes_).view(tensor.dtype)
    parts = torch.split(together, sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _given_back(
    collectives: Collectives, others: Sequence[torch.Tensor], own: tuple[int, ...]
) -> torch.Tensor:
    """Gives the other ranks what is theirs; returns the sum of what they give this one."""
    flat = [each.reshape(-1) for each in others]
    flat.insert(collectives.rank, others[0].new_empty(torch.Size(own).numel()))
    if not any(each.numel() for each in flat):
        return others[0].new_empty(own)
    return collectives.sum_parts(flat, with_own=False).view(own)


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


def _others_again(ctx: Any, *gradients: torch.Tensor) -> Any:
    meet_again(ctx)
    group = ctx.handle()
    lanes = list(gradients)
    lanes.insert(group.rank, gradients[0].new_zeros(ctx.shapes[group.rank]))
    made = _Summed.apply(ctx.handle, *lanes)  # type: ignore[no-untyped-call]
    ctx.way.come_back(group.exchanged(made, in_backward=True))
    return gradients[0].new_empty(0), None, None, None


def _to_lanes_again(ctx: Any, *gradients: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _Summed.apply(ctx.handle, *gradients)  # type: ignore[no-untyped-call]
    return ctx.handle().exchanged(made, in_backward=True), None, None


def _summed_again(ctx: Any, gradient: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _ToLanes.apply(gradient, ctx.handle, ctx.shapes)  # type: ignore[no-untyped-call]
    ctx.handle().exchanged(made[0], in_backward=True)
    return None, *made


def _common_again(ctx: Any, gradient: torch.Tensor) -> Any:
    meet_again(ctx)
    share = gradient / len(ctx.shapes)
    made = _ToLanes.apply(share, ctx.handle, ctx.shapes)  # type: ignore[no-untyped-call]
    ctx.handle().exchanged(made[0], in_backward=True)
    return None, *made


def _added_up_again(ctx: Any, gradient: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _AddedUp.apply(gradient, ctx.handle)  # type: ignore[no-untyped-call]
    return ctx.handle().exchanged(made, in_backward=True), None


def _joined_again(ctx: Any, gradient: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _Parted.apply(ctx.handle, ctx.dim, ctx.shapes, gradient)  # type: ignore[no-untyped-call]
    ctx.handle().exchanged(made[0], in_backward=True)
    return None, None, *made


def _parted_again(ctx: Any, *gradients: torch.Tensor) -> Any:
    meet_again(ctx)
    made = _Joined.apply(ctx.handle, ctx.dim, *gradients)  # type: ignore[no-untyped-call]
    return None, None, None, ctx.handle().exchanged(made, in_backward=True)


class _Given(torch.autograd.Function):
    """A tensor of the own call, given to the others: what they find for its gradient comes back.

    That comes by a token. Of several nodes that could run autograd takes the one that was made
    last, so this one, made before the own call was computed, waits for it after that call has been
    differentiated.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handle: Handle, way: _Way, shapes: Shapes) -> Any:
        ctx.handle, ctx.way = handle, way
        way.give(handle(), tensor, shapes)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, of_token: torch.Tensor) -> Any:
        return ctx.way.of_others(ctx.handle()), None, None, None


class _Others(torch.autograd.Function):
    """The same tensor for the calls of the other ranks, as they have given it."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, handle: Handle, way: _Way, shapes: Shapes) -> Any:
        mark(ctx, token)
        ctx.handle, ctx.way, ctx.shapes = handle, way, shapes
        return way.others(handle())

    @staticmethod
    @differentiated_by(_others_again)
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        meet_again(ctx)
        group = ctx.handle()
        ctx.way.give_back(group, gradients, ctx.shapes[group.rank])
        return gradients[0].new_empty(0), None, None, None


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


class _Common(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, *lanes: torch.Tensor) -> torch.Tensor:
        mark(ctx, lanes[0])
        ctx.handle, ctx.collectives = handle, handle().collectives
        ctx.shapes = tuple(tuple(each.shape) for each in lanes)
        own: torch.Tensor = lanes[ctx.collectives.rank].clone()
        return own

    @staticmethod
    @differentiated_by(_common_again)
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return None, *_gathered(ctx.collectives, gradient / len(ctx.shapes), ctx.shapes)


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, handle: Handle) -> torch.Tensor:
        mark(ctx, share)
        ctx.handle, ctx.collectives = handle, handle().collectives
        total: torch.Tensor = ctx.collectives.sum(share)
        return total

    @staticmethod
    @differentiated_by(_added_up_again)
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        meet_again(ctx)
        return ctx.collectives.sum(gradient), None


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
