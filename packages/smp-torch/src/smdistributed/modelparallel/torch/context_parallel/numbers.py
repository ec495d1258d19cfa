"""The numbers that calls are tried with, in the places of tensors.

Numbers are drawn in double precision, so that what is mixed stands out of rounding: above zero, for
roots and logarithms; small and of both signs, for what saturates; and with one alone on its side of
zero, so that an ``any`` or a maximum is told from what every rank has alike. Of whole numbers and
truths those are drawn that the tensor has, so that indices stay in bounds; of one that has no
numbers yet, as where a step is recorded, zeros and ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, cut

#: With so many sets of numbers a call is tried, and one that reduces a sequence with one more, see
#: ``_uneven``. Those of both signs are so small.
TRIALS = 4
_SMALL = 0.3


@dataclass(frozen=True)
class Given:
    """One tensor that a call is tried with.

    Attributes:
        shape: of the whole.
        like: a tensor of this rank, of which type and numbers are taken.
        layouts: how it may be cut; None stands for the whole. The first that fits is taken.
        is_own: this rank has a piece, so the call may write to it.
    """

    shape: torch.Size
    like: torch.Tensor
    layouts: tuple[Layout | None, ...]
    is_own: bool


def drawn(
    given: Given, double: bool, number: int, draws: torch.Generator, num_ranks: int
) -> torch.Tensor:
    """Returns random numbers in the place of a tensor.

    Args:
        given: the tensor.
        double: in double precision.
        number: of the trial, up to ``TRIALS``.
        draws: gives them.
        num_ranks: that share a sequence.
    """
    tensor = _spread(given, double, number, draws)
    if number == TRIALS and given.is_own:
        return _uneven(tensor, given.layouts[0], num_ranks, draws)
    return tensor


def _spread(given: Given, double: bool, number: int, draws: torch.Generator) -> torch.Tensor:
    like, shape = given.like.detach(), given.shape
    if is_inexact(like):
        dtype = like.dtype
        if double:
            dtype = torch.complex128 if like.is_complex() else torch.float64
        wide = dtype if dtype.itemsize > 2 else torch.float32  # some narrow types draw nothing
        values = torch.empty(shape, dtype=wide, device=like.device)
        if like.is_complex() or number == 1:
            return values.normal_(generator=draws).mul_(_SMALL).to(dtype)
        values.uniform_(0.5, 1.5, generator=draws).mul_(-1 if number == 2 else 1)
        if number and values.numel():
            values.view(-1)[-1].mul_(-1)
        return values.to(dtype)
    if not like.numel():
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if isinstance(like, FakeTensor) and not number:  # the index of the only row of a table
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    if like.dtype == torch.bool or isinstance(like, FakeTensor):
        known = torch.tensor([0, 1], dtype=like.dtype, device=like.device)
    else:
        known = _told_apart(like.reshape(-1), number)
    if number in (0, TRIALS - 1, TRIALS):
        chosen = torch.randint(known.numel(), (shape.numel(),), generator=draws, device=like.device)
        return known[chosen].view(shape)
    common, single = (known.amin(), known.amax())[:: 1 if number == 1 else -1]
    values = common.expand(shape.numel()).clone()
    if len(values):
        values[-1] = single
    return values.view(shape)


def _told_apart(known: torch.Tensor, number: int) -> torch.Tensor:
    """Returns whole numbers that a tensor has, or one more if these are all the same.

    Among equal ones the first token is not told from the last.
    """
    least, most = known.amin(), known.amax()
    if not number or least != most:
        return known
    return torch.stack([most, (most == 0).to(most.dtype)])


def may_be_out_of_bounds(given: Given, number: int) -> bool:
    """Whether numbers are drawn that a tensor may not have, as a table may have one row alone.

    On the host a call that is given such fails, and says nothing; on a device it would end the
    process, so it is asked on the host first.
    """
    like = given.like
    if not number or is_inexact(like) or like.dtype == torch.bool or like.device.type == "cpu":
        return False
    return isinstance(like, FakeTensor) or bool(like.numel() and like.amax() <= 0)


def _uneven(
    tensor: torch.Tensor, layout: Layout | None, num_ranks: int, draws: torch.Generator
) -> torch.Tensor:
    """Returns a tensor whose pieces are of other kinds: those of the first rank lack more numbers.

    Functions may leave out what is no number, and so count differently for each piece. Of whole
    numbers the first rank has the largest, the others the smallest.
    """
    if layout is None or not tensor.numel():
        return tensor
    shape = [1] * tensor.dim()
    shape[layout.dim] = tensor.shape[layout.dim]
    places = torch.arange(shape[layout.dim], device=tensor.device).view(shape)
    first = torch.zeros_like(places, dtype=torch.bool)
    own = cut(places, layout, 0, num_ranks).flatten()
    first = first.index_fill(layout.dim, own, True)
    if not is_inexact(tensor):
        ends = tensor.amax(), tensor.amin()
        return torch.where(first, *ends).expand(tensor.shape).clone()
    drawn = torch.rand(tensor.shape, generator=draws, device=tensor.device)
    return torch.where(drawn < torch.where(first, 0.75, 0.25), torch.nan, tensor)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether its numbers are rounded."""
    return tensor.is_floating_point() or tensor.is_complex()
