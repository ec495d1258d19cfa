"""Which tokens a call moves: what it gives are tokens that it is given, and numbers of its own.

So do slices along a sequence, ``torch.cat``, ``chunk``, ``roll``, ``flip`` and paddings. No list
says so: the call is made with codes in the places of numbers, of which each says what token, or
channel, it stands for. A call that computes anything, or goes by numbers, gives no such codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes, pytree
from smdistributed.modelparallel.torch.context_parallel.calls import put_together

#: With so many sets of codes a call is made.
_TRIALS = 2
#: A call with more numbers is made with so many of each dim that is not the sequence.
_LARGE = 2**16
_FEW = 8


class Run(NamedTuple):
    """Tokens of a result, one after the other.

    Attributes:
        source: the number of the tensor that they are of; -1 for a number of the call's own.
        start: the place of the first.
        step: from one to the next: 1, -1, or 0 for the same.
        length: how many they are.
        number: the call's own.
    """

    source: int
    start: int
    step: int
    length: int
    number: float = 0.0


class Moved(NamedTuple):
    """A result that is made of tokens.

    Attributes:
        runs: they, one after the other.
        is_one: of one token, without the dim of the sequence.
    """

    runs: tuple[Run, ...]
    is_one: bool

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return sum(each.length for each in self.runs)


def moved_tokens(
    function: Callable[..., Any],
    spec: Any,
    leaves: Sequence[Any],
    wholes: Sequence[torch.Size],
    dim: int,
    results: Sequence[torch.Size],
) -> tuple[list[Moved], Any] | None:
    """Returns the tokens that each result is made of, and the structure of the results.

    None if one is made of anything else.

    Args:
        function: that is called.
        spec: the structure of its arguments.
        leaves: the arguments for the whole, with holes for tensors.
        wholes: shapes of the tensors.
        dim: along which they have tokens.
        results: shapes that the call has given.
    """
    others = [_others(each, dim) for each in wholes]
    if len(set(others)) != 1 or not results:
        return None
    if any(
        each[:dim] + each[dim + (len(each) == len(wholes[0])) :] != others[0] for each in results
    ):
        return None
    kept = [_kept(each, dim, wholes) for each in wholes]
    call = _Coded(function, spec, leaves, kept, dim)
    found: list[Moved] | None = None
    for trial in range(_TRIALS):
        moved = call.tokens(trial, results)
        if moved is None or found not in (None, moved):
            return None
        found = moved
    if found is None or not all(call.keeps(at, found) for at in range(len(kept[0])) if at != dim):
        return None
    return found, call.structure


def _others(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _kept(shape: torch.Size, dim: int, wholes: Sequence[torch.Size]) -> torch.Size:
    """Returns the shape that a tensor is coded with."""
    if sum(each.numel() for each in wholes) <= _LARGE:
        return shape
    return torch.Size(size if at == dim else min(size, _FEW) for at, size in enumerate(shape))


class _Coded:
    """Makes a call with codes in the places of numbers.

    Attributes:
        structure: of what it has given.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        shapes: Sequence[torch.Size],
        dim: int,
    ) -> None:
        self._function = function
        self._spec = spec
        self._leaves = leaves
        self._shapes = shapes
        self._dim = dim
        self.structure: Any = None

    def tokens(self, trial: int, results: Sequence[torch.Size]) -> list[Moved] | None:
        """Returns what tokens each result is made of; None if it is made of others."""
        sizes = [shape[self._dim] for shape in self._shapes]
        codes = _codes(sum(sizes), trial)
        own = torch.split(codes, sizes)
        made = self._made(self._dim, own)
        if made is None or len(made) != len(results):
            return None
        found = []
        for each, shape in zip(made, results, strict=True):
            is_one = len(shape) < len(self._shapes[0])
            if is_one:
                each = each.unsqueeze(self._dim) if each.dim() == len(shape) else each
            if each.dim() != len(self._shapes[0]) or (
                not is_one and each.shape[self._dim] != shape[self._dim]
            ):
                return None
            line = _along(each, self._dim)
            if line is None:
                return None
            found.append(Moved(tuple(_runs(line, codes, sizes)), is_one))
        return found

    def keeps(self, dim: int, moved: Sequence[Moved]) -> bool:
        """Whether what lies along another dim stays in its order."""
        codes = _codes(self._shapes[0][dim], dim)
        made = self._made(dim, [codes] * len(self._shapes))
        if made is None or len(made) != len(moved):
            return False
        for each, tokens in zip(made, moved, strict=True):
            each = each.unsqueeze(self._dim) if tokens.is_one else each
            if each.shape[dim] != len(codes):
                return False
            own = torch.tensor(
                [run.number if run.source < 0 else math.nan for run in tokens.runs],
                dtype=torch.float64,
            ).repeat_interleave(torch.tensor([run.length for run in tokens.runs]))
            numbers = _line(own, self._dim, each.dim())
            expected = torch.where(numbers.isnan(), _line(codes, dim, each.dim()), numbers)
            if not bool((_narrowed(each, (dim, self._dim)) == expected).all()):
                return False
        return True

    def _made(self, dim: int, codes: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns what the call gives for codes along a dim; None if it fails."""
        given = [
            _line(each, dim, len(shape)).expand(shape)
            for each, shape in zip(codes, self._shapes, strict=True)
        ]
        try:
            with past_all_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                args, kwargs = put_together(self._spec, self._leaves, given)
                result = self._function(*args, **kwargs)
        except Exception:  # of a call that wants other numbers, or more of them
            return None
        made, self.structure = pytree.tree_flatten(result)
        return made if all(map(_is_coded, made)) else None


def _is_coded(result: Any) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.dtype == torch.float64
        and result.device.type == "cpu"
    )


def _codes(count: int, trial: int) -> torch.Tensor:
    """Returns numbers that nobody gives: in no order, of both signs, and not whole."""
    draws = torch.Generator().manual_seed(trial)
    signs = torch.randint(2, (count,), generator=draws) * 2 - 1
    return (torch.randperm(count, generator=draws) + 1.375).to(torch.float64) * signs


def _line(numbers: torch.Tensor, dim: int, num_dims: int) -> torch.Tensor:
    shape = [1] * num_dims
    shape[dim] = len(numbers)
    return numbers.view(shape)


def _along(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Returns the numbers along a dim, if they are the same along all others."""
    tensor = _narrowed(tensor, (dim,))
    lines = tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])
    if not len(lines):
        return None
    return lines[0] if bool((lines == lines[0]).all()) else None


def _narrowed(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Returns a tensor with one number along those other dims along which its memory has one."""
    for dim, stride in enumerate(tensor.stride()):
        if dim not in dims and not stride and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _runs(line: torch.Tensor, codes: torch.Tensor, sizes: Sequence[int]) -> Iterator[Run]:
    """Yields what numbers stand for."""
    ordered, places = codes.sort()
    at = torch.searchsorted(ordered, line).clamp(max=len(codes) - 1)
    found = torch.where(ordered[at] == line, places[at], -1).tolist()
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    run: Run | None = None
    for place, number in zip(found, line.tolist(), strict=True):
        source = next(at for at, end in enumerate(ends) if place < end) if place >= 0 else -1
        start = place - ends[source] + sizes[source] if place >= 0 else 0
        longer = None if run is None else _longer(run, source, start, number)
        if longer is None and run is not None:
            yield run
        run = longer or Run(source, start, 1, 1, 0.0 if source >= 0 else number)
    if run is not None:
        yield run


def _longer(run: Run, source: int, start: int, number: float) -> Run | None:
    """Returns a run with one more token; None if that is none of its."""
    if source != run.source:
        return None
    if source < 0:
        return run._replace(length=run.length + 1, step=0) if number == run.number else None
    step = start - run.start if run.length == 1 else run.step
    if abs(step) > 1 or start != run.start + step * run.length:
        return None
    return run._replace(length=run.length + 1, step=step)
