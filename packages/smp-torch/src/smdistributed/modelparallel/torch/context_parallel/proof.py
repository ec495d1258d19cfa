"""Whether a call gives for pieces the pieces of what it gives for the whole: tried with numbers.

The call is made once for a whole of random numbers, and once for the pieces of it that each rank
would have. No list says which functions may be called: what is right is right by its results. They
may be the pieces of the whole's results; the same on every rank; or parts whose sum over the ranks,
or mean, is the whole's.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes
from smdistributed.modelparallel.torch.context_parallel.calls import put_together, results_of
from smdistributed.modelparallel.torch.context_parallel.layout import (
    BLOCKS,
    Layout,
    cut,
    shares_of,
)
from smdistributed.modelparallel.torch.context_parallel.numbers import (
    TRIALS,
    Given,
    drawn,
    is_inexact,
    may_be_out_of_bounds,
)

#: Results may differ by so many units in the last place of the largest number.
_ULPS = 256
#: Numbers are kept of calls with fewer in all, and are not in double precision of those with more.
_SMALL_SIZE = 2**22
_LARGE = 2**30
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
        own: the same for the piece of each rank.
        given: its tensors.
        num_ranks: that share a sequence.
        backward: whether gradients are compared too, since the function has code for them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: Any,
        whole: Sequence[Any],
        own: Sequence[Sequence[Any]],
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
        self._cases: dict[int, _Case] = {}
        known = [each for form in given for each in form.layouts if each is not None]
        self._outers = sorted({each.outer for each in known})
        self._windows = dict.fromkeys(each.window for each in known)
        self._shares: tuple[float, ...] | None = None

    def proof(self) -> Proof | None:
        """Returns how it computes; None if no way was found in which pieces are right."""
        with _undisturbed(self._given):
            for double in (True, False) if self._size < _LARGE else (False,):
                ways = itertools.product(*(each.layouts for each in self._given))
                for layouts in itertools.islice(ways, _MOST_WAYS):
                    results = self._results(layouts, double)
                    if results is not None:
                        return Proof(layouts, results)
                self._cases.clear()
        return None

    @property
    def _size(self) -> int:
        return sum(each.shape.numel() for each in self._given)

    # ------------------------------------------------------------------ numbers

    def _case(self, double: bool, number: int) -> _Case:
        """Returns numbers, and what the call gives for them; what is small is kept."""
        if number in self._cases:
            return self._cases[number]
        tensors = self._drawn(double, number)
        whole = None
        if self._takes(tensors, number):
            whole = self._made(self._whole, tensors)
        case = _Case(tensors, whole)
        if self._size < _SMALL_SIZE:
            self._cases[number] = case
        return case

    def _takes(self, tensors: Sequence[torch.Tensor], number: int) -> bool:
        """Whether the call may be given some numbers, see ``may_be_out_of_bounds``."""
        if not any(may_be_out_of_bounds(each, number) for each in self._given):
            return True
        return self._made(self._whole, [each.cpu() for each in tensors]) is not None

    def _drawn(self, double: bool, number: int) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for place, each in enumerate(self._given):
            if id(each.like) not in found:
                draws = torch.Generator(each.like.device).manual_seed(1000 * number + place)
                found[id(each.like)] = drawn(each, double, number, draws, self._num_ranks)
        return [found[id(each.like)] for each in self._given]

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
        self, layouts: tuple[Layout | None, ...], double: bool
    ) -> tuple[Result, ...] | None:
        """Returns what the results are, the same with all numbers; None if they are not right."""
        fitting: list[list[Result]] | None = None
        says_something = False
        self._shares = shares_of([each.shape for each in self._given], layouts, self._num_ranks)
        for number in range(TRIALS + 1):
            if number == TRIALS and not (fitting and _reduces(fitting)):
                break
            case = self._case(double, number)
            if case.whole is None:
                continue
            pieces = self._of_pieces(layouts, case.tensors)
            if pieces is None or any(len(each) != len(case.whole) for each in pieces):
                return None
            if not self._are_written_alike(layouts, case, pieces):
                return None
            count = len(case.whole) - len(self._given)
            rows = list(zip(*pieces, strict=True))[:count]
            says_something |= _say_something(case.whole[:count])
            if fitting is None:
                pairs = zip(case.whole[:count], rows, strict=True)
                fitting = [self._fitting(*pair) for pair in pairs]
            elif len(fitting) != count:
                return None
            else:
                fitting = [
                    [each for each in among if self._is(each, whole, row)]
                    for among, whole, row in zip(fitting, case.whole[:count], rows, strict=True)
                ]
            if not all(fitting):
                return None
        if fitting is None or not says_something:
            return None
        return self._without_gradients(layouts, [each[0] for each in fitting])

    def _without_gradients(
        self, layouts: Sequence[Layout | None], results: list[Result]
    ) -> tuple[Result, ...] | None:
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
            results = self._made(self._own[rank], [own[id(each), layout] for each, layout in pairs])
            if results is None:
                return None
            made.append(results)
        return made

    def _are_written_alike(
        self,
        layouts: Sequence[Layout | None],
        case: _Case,
        pieces: Sequence[Sequence[torch.Tensor]],
    ) -> bool:
        """Whether what the call writes to stays what it was: a piece, or the whole."""
        assert case.whole is not None
        count = len(case.whole) - len(self._given)
        for place, (layout, given) in enumerate(zip(layouts, self._given, strict=True)):
            before, after = case.tensors[place], case.whole[count + place]
            is_written = after.shape != before.shape or not _are_equal(after, before)
            if is_written and not given.is_own and layout is not None:
                return False  # it would be written to a copy
            expected = Result(Kind.SAME) if layout is None else Result(Kind.CUT, layout)
            if not self._is(expected, after, [each[count + place] for each in pieces]):
                return False
        return True

    def _fitting(self, whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[Result]:
        """Returns what a result may be, of which other numbers will choose."""
        found = []
        for result in self._candidates(whole, pieces):
            if self._is(result, whole, pieces):
                found.append(result)
                if result.layout is not None:
                    break
        return found

    def _candidates(self, whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[Result]:
        if any(whole.dim() != each.dim() for each in pieces):
            return
        differ = {
            at for each in pieces for at, size in enumerate(whole.shape) if size != each.shape[at]
        }
        if not differ:
            yield Result(Kind.SAME)
            if whole.dtype != torch.bool:
                yield Result(Kind.SUM)
                yield Result(Kind.MEAN)
            return
        if len(differ) > 1:
            return
        (dim,) = differ
        sizes = [each.shape[dim] for each in pieces]
        for layout in self._layouts_along(dim, whole.shape[dim]):
            found = [layout.size_of(whole.shape[dim], at, len(pieces)) for at in range(len(pieces))]
            if found == sizes:
                yield Result(Kind.CUT, layout)

    def _layouts_along(self, dim: int, size: int) -> Iterator[Layout]:
        for window in self._windows:
            tokens = BLOCKS * self._num_ranks if window is None else len(window)
            for outer in dict.fromkeys([*self._outers, *divisors(size // tokens)]):
                layout = Layout(dim, outer, window)
                if layout.divides(size, self._num_ranks):
                    yield layout

    def _is(self, result: Result, whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
        if result.layout is not None:
            return all(
                _are_equal(piece, cut(whole, result.layout, rank, self._num_ranks))
                for rank, piece in enumerate(pieces)
            )
        if result.kind is Kind.SAME:
            return all(_are_equal(piece, whole) for piece in pieces)
        if any(each.shape != whole.shape for each in pieces):
            return False
        if result.kind is Kind.SUM:
            total = torch.stack(list(pieces)).sum(0)
        elif self._shares is None or not is_inexact(whole):
            return False
        else:
            pairs = zip(pieces, self._shares, strict=True)
            total = torch.stack([each * share for each, share in pairs if share]).sum(0)
        return _are_equal(total.to(whole.dtype), whole)


class _Case(NamedTuple):
    """Numbers that a call is tried with.

    Attributes:
        tensors: they.
        whole: what the call gives for them; None if it fails.
    """

    tensors: list[torch.Tensor]
    whole: list[torch.Tensor] | None


def _reduces(fitting: Sequence[Sequence[Result]]) -> bool:
    """Whether a call gives something that is not cut."""
    return any(each.layout is None for among in fitting for each in among)


def _with_gradients(
    function: Callable[..., Any], spec: Any, leaves: Sequence[Any], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns results, and the gradients of what is given for the sum of their squares."""
    with torch.enable_grad():
        inputs = [each for each in given if is_inexact(each)]
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
    return (layout for layout, each in zip(layouts, given, strict=True) if is_inexact(each.like))


def _say_something(results: Sequence[torch.Tensor]) -> bool:
    return not any(
        is_inexact(each) and bool(each.isnan().all()) for each in results if each.numel()
    )


def _are_equal(one: torch.Tensor, another: torch.Tensor) -> bool:
    if one.shape != another.shape or one.dtype != another.dtype:
        return False
    if not is_inexact(one):
        return torch.equal(one, another)
    pairs = list(zip(_parts(one), _parts(another), strict=True))
    scale = max((float(each.abs().nan_to_num(0.0, 0.0, 0.0).max()) for _, each in pairs), default=0)
    bound = _ULPS * torch.finfo(one.dtype).eps * scale
    return all(torch.allclose(*each, rtol=0.0, atol=bound, equal_nan=True) for each in pairs)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the parts of a tensor; a comparison makes several others of the size of each."""
    if tensor.numel() <= _SMALL_SIZE or not tensor.dim():
        if tensor.numel():
            yield tensor
        return
    dim = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    size = max(1, tensor.shape[dim] * _SMALL_SIZE // tensor.numel())
    yield from torch.split(tensor, size, dim)


def divisors(number: int) -> list[int]:
    """Returns what divides a number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
