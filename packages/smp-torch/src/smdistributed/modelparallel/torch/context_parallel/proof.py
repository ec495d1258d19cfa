"""Whether a call gives for pieces the pieces of what it gives for the whole: tried with numbers.

The call is made once for a whole of random numbers, and once for the pieces of it that each rank
would have. No list says which functions may be called: what is right is right by its results. They
may be the pieces of the whole's results; the same on every rank; or parts whose sum over the ranks,
or mean, is the whole's.

Numbers are drawn in double precision, so that what is mixed stands out of rounding: once above
zero, for roots and logarithms, and twice small and of both signs, for what saturates. Of whole
numbers and truths those are drawn that the tensor has, so that indices stay in bounds, and then one
that is alone among others, so that an ``any`` is told from what every rank has alike.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes
from smdistributed.modelparallel.torch.context_parallel.calls import put_together, results_of
from smdistributed.modelparallel.torch.context_parallel.layout import BLOCKS, Layout, cut

#: Results may differ by so many units in the last place of the largest number.
_ULPS = 256
#: With so many sets of numbers a call is tried, which are so small from the second on.
_TRIALS = 3
_SMALL = 0.3
#: So many ways to cut the tensors of one call are tried at most.
_MOST_WAYS = 256


class Kind(enum.Enum):
    """How a result of pieces has to do with that of the whole."""

    CUT = "cut"
    SAME = "same"
    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class Result:
    """One result of a call.

    Attributes:
        kind: what it is.
        layout: if it is cut, how.
    """

    kind: Kind
    layout: Layout | None = None


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


@dataclass(frozen=True)
class Proof:
    """How a call computes with pieces.

    Attributes:
        layouts: how each tensor is cut.
        results: what each result is.
    """

    layouts: tuple[Layout | None, ...]
    results: tuple[Result, ...]


class Trial:
    """Tries one call.

    Args:
        function: that is called.
        spec: the structure of its arguments.
        whole: the arguments for the whole, with holes for tensors.
        own: the same for a piece.
        given: its tensors.
        num_ranks: that share a sequence.
        backward: whether gradients are compared too, since the function has code for them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: Any,
        whole: Sequence[Any],
        own: Sequence[Any],
        given: Sequence[Given],
        num_ranks: int,
        *,
        backward: bool = False,
    ) -> None:
        self._function = function
        self._spec = spec
        self._whole = whole
        self._own = own
        self._given = given
        self._num_ranks = num_ranks
        self._backward = backward
        self._outers = sorted(
            {each.outer for form in given for each in form.layouts if each is not None}
        )

    def proof(self) -> Proof | None:
        """Returns how it computes; None if no way was found in which pieces are right."""
        ways = itertools.product(*(each.layouts for each in self._given))
        with _undisturbed(self._given):
            for double in (True, False):
                drawn = [self._drawn(double, number) for number in range(_TRIALS)]
                wholes = [self._made(self._whole, each) for each in drawn]
                if not any(each is not None and _says_something(each) for each in wholes):
                    continue
                for layouts in itertools.islice(ways, _MOST_WAYS):
                    results = self._results(layouts, drawn, wholes)
                    if results is not None:
                        return Proof(layouts, results)
                return None
        return None

    # ------------------------------------------------------------------ numbers

    def _drawn(self, double: bool, number: int) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(number)
        found: dict[int, torch.Tensor] = {}
        return [
            found.setdefault(id(each.like), self._tensor(each, double, number, draws))
            for each in self._given
        ]

    def _tensor(
        self, given: Given, double: bool, number: int, draws: torch.Generator
    ) -> torch.Tensor:
        like, shape = given.like, given.shape
        if _is_inexact(like):
            wide = torch.complex128 if like.is_complex() else torch.float64
            if number == 0:
                values = torch.rand(shape, generator=draws, dtype=torch.float64) + 0.5
            else:
                values = torch.randn(shape, generator=draws, dtype=torch.float64) * _SMALL
            return values.to(device=like.device, dtype=wide if double else like.dtype)
        known = like.detach().reshape(-1).to("cpu")
        if not known.numel():
            return like.new_empty(shape)
        if like.dtype == torch.bool:
            known = torch.tensor([False, True])
        if number == 0:
            chosen = torch.randint(known.numel(), (shape.numel(),), generator=draws)
            return known[chosen].view(shape).to(like.device)
        common, single = (known.amin(), known.amax())[:: 1 if number == 1 else -1]
        values = common.expand(shape.numel()).clone()
        if len(values):
            values[-1] = single
        return values.view(shape).to(like.device)

    # ------------------------------------------------------------------ results

    def _made(
        self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Returns results, gradients and what was written to; None if the call fails."""
        copies: dict[int, torch.Tensor] = {}
        for each in tensors:
            copies.setdefault(id(each), each.clone())
        given = [copies[id(each)] for each in tensors]
        try:
            if self._backward:
                return [*_with_gradients(self._function, self._spec, leaves, given), *given]
            args, kwargs = put_together(self._spec, leaves, given)
            return [*results_of(self._function(*args, **kwargs)), *given]
        except Exception:
            return None

    def _results(
        self,
        layouts: tuple[Layout | None, ...],
        drawn: Sequence[Sequence[torch.Tensor]],
        wholes: Sequence[list[torch.Tensor] | None],
    ) -> tuple[Result, ...] | None:
        found: tuple[Result, ...] | None = None
        for tensors, whole in zip(drawn, wholes, strict=True):
            if whole is None:
                continue
            pieces = self._of_pieces(layouts, tensors)
            if pieces is None or any(len(each) != len(whole) for each in pieces):
                return None
            results = self._compared(layouts, tensors, whole, pieces)
            if results is None or (found is not None and results != found):
                return None
            found = results
        return found

    def _of_pieces(
        self, layouts: Sequence[Layout | None], tensors: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]] | None:
        made = []
        for rank in range(self._num_ranks):
            own: dict[tuple[int, Layout | None], torch.Tensor] = {}
            for tensor, layout in zip(tensors, layouts, strict=True):
                if (id(tensor), layout) not in own:
                    piece = tensor
                    if layout is not None:
                        piece = cut(tensor, layout, rank, self._num_ranks)
                    own[id(tensor), layout] = piece
            pairs = zip(tensors, layouts, strict=True)
            results = self._made(self._own, [own[id(each), layout] for each, layout in pairs])
            if results is None:
                return None
            made.append(results)
        return made

    def _compared(
        self,
        layouts: Sequence[Layout | None],
        tensors: Sequence[torch.Tensor],
        whole: list[torch.Tensor],
        pieces: list[list[torch.Tensor]],
    ) -> tuple[Result, ...] | None:
        count = len(whole) - len(self._given)
        rows = list(zip(*pieces, strict=True))
        # What the call writes to is to be what it was: a piece, or the whole.
        for place, (layout, given) in enumerate(zip(layouts, self._given, strict=True)):
            after, row = whole[count + place], rows[count + place]
            if after.shape == tensors[place].shape and torch.equal(after, tensors[place]):
                expected = Result(Kind.SAME) if layout is None else Result(Kind.CUT, layout)
                if not self._is(expected, after, row):
                    return None
            elif not (given.is_own or layout is None):
                return None  # it would be written to a copy
            elif not self._is(
                Result(Kind.SAME) if layout is None else Result(Kind.CUT, layout), after, row
            ):
                return None
        results = []
        for after, row in zip(whole[:count], rows[:count], strict=True):
            result = self._kind_of(after, row)
            if result is None:
                return None
            results.append(result)
        if not self._backward:
            return tuple(results)
        inexact = list(_layouts_of_inexact(layouts, self._given))
        results, gradients = results[: -len(inexact)], results[-len(inexact) :]
        for layout, gradient in zip(inexact, gradients, strict=True):
            # Ranks add up the gradient of what they have alike.
            kind = Kind.SUM if layout is None else Kind.CUT
            if gradient.kind is not kind or gradient.layout != layout:
                return None
        return tuple(results)

    def _kind_of(self, whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Result | None:
        for result in self._candidates(whole, pieces[0]):
            if self._is(result, whole, pieces):
                return result
        return None

    def _candidates(self, whole: torch.Tensor, piece: torch.Tensor) -> Iterator[Result]:
        if whole.dim() != piece.dim():
            return
        differ = [at for at, size in enumerate(whole.shape) if size != piece.shape[at]]
        if not differ:
            yield Result(Kind.SAME)
            if whole.dtype != torch.bool:
                yield Result(Kind.SUM)
                yield Result(Kind.MEAN)
            return
        if len(differ) > 1 or whole.shape[differ[0]] != piece.shape[differ[0]] * self._num_ranks:
            return
        size = whole.shape[differ[0]]
        outers = dict.fromkeys([*self._outers, *divisors(size // (BLOCKS * self._num_ranks))])
        for outer in outers:
            if Layout(differ[0], outer).divides(size, self._num_ranks):
                yield Result(Kind.CUT, Layout(differ[0], outer))

    def _is(self, result: Result, whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
        if result.layout is not None:
            return all(
                _are_equal(piece, cut(whole, result.layout, rank, self._num_ranks))
                for rank, piece in enumerate(pieces)
            )
        if result.kind is Kind.SAME:
            return all(_are_equal(piece, whole) for piece in pieces)
        total = torch.stack(list(pieces)).sum(0)
        if result.kind is Kind.MEAN:
            if not _is_inexact(whole):
                return False
            total = total / len(pieces)
        return _are_equal(total.to(whole.dtype), whole)


def _with_gradients(
    function: Callable[..., Any], spec: Any, leaves: Sequence[Any], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns results, and the gradients of what is given for the sum of their squares."""
    with torch.enable_grad():
        inputs = [each for each in given if _is_inexact(each)]
        for each in inputs:
            each.requires_grad_()
        args, kwargs = put_together(spec, leaves, [each.view_as(each) for each in given])
        results = results_of(function(*args, **kwargs))
        total = sum((each.abs().pow(2).sum() for each in results if each.requires_grad), start=0)
        gradients: Sequence[Any] = [None] * len(inputs)
        if isinstance(total, torch.Tensor):
            gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        found = [
            torch.zeros_like(each) if gradient is None else gradient
            for each, gradient in zip(inputs, gradients, strict=True)
        ]
    for each in inputs:
        each.requires_grad_(False)
    return [each.detach() for each in (*results, *found)]


@contextlib.contextmanager
def _undisturbed(given: Sequence[Given]) -> Iterator[None]:
    """Inside, nothing is seen, drawn for the script, differentiated, or cast."""
    kinds = {each.like.device.type for each in given} or {"cpu"}
    devices = [each.like.device for each in given if each.like.device.type == "cuda"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(past_all_modes())
        stack.enter_context(torch.random.fork_rng(devices=devices[:1]))
        stack.enter_context(torch.no_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _layouts_of_inexact(
    layouts: Sequence[Layout | None], given: Sequence[Given]
) -> Iterator[Layout | None]:
    """Yields how those tensors are cut that have gradients."""
    return (layout for layout, each in zip(layouts, given, strict=True) if _is_inexact(each.like))


def _says_something(results: Sequence[torch.Tensor]) -> bool:
    return not any(_is_inexact(each) and bool(each.isnan().any()) for each in results)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _are_equal(one: torch.Tensor, another: torch.Tensor) -> bool:
    if one.shape != another.shape or one.dtype != another.dtype:
        return False
    if not _is_inexact(one):
        return torch.equal(one, another)
    finite = another.abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max()) if finite.numel() else 0.0
    bound = _ULPS * torch.finfo(one.dtype).eps * scale
    return torch.allclose(one, another, rtol=0.0, atol=bound, equal_nan=True)


def divisors(number: int) -> list[int]:
    """Returns what divides a number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
