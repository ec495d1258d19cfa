"""How far rounding alone moves what a module computes.

Slices add up in another order than the whole does, and processors differ in that too, so results
that should be equal are not quite. How much is allowed cannot be a constant: a sum of a thousand
products loses 1e-15 of its size, the gradient behind a saturated softmax is nothing but rounding.
So it is measured: the whole computes once more, and each of its operations errs by a few units in
the last place, as ``Rounding`` has it. What that moves by 1e-13, slices may move by some times as
much. For example, a feed-forward layer in double precision moves by 1e-15 of its norm, its slices
differ from it by 2e-16, and with a softmax over each slice by 6e-2.

What errs is what depends on the numbers that were drawn. A position, a bucket or a mask made from
nothing but shapes is the same on every processor, and a small whole number is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch

from smdistributed.modelparallel.torch.compat.private.modes import TorchDispatchMode
from smdistributed.modelparallel.torch.tensors.memory import MemoryNotes

#: So many units in the last place an operation may err.
_ULPS = 4
#: What slices may move beyond what rounding was seen to move. Measured are errors of results, and
#: a long sum errs by several of them.
_MARGIN = 100
#: Where rounding moves more than this share of a result, equality with it would say nothing.
_VAGUE = 1e-2
#: Floats of whole numbers up to this are taken for exact.
_EXACT = 2.0**20 - 1
#: So many numbers are drawn at once: most results have few, and each draw takes its time.
_DRAWN = 4096


class Rounding(TorchDispatchMode):
    """Has each operation err by some units in the last place, as another processor might.

    Args:
        drawn: what errs, and all that is computed from it.
        seed: of the errors.
    """

    def __init__(self, drawn: Iterable[torch.Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = torch.Generator().manual_seed(seed)
        self._drawn = torch.empty(0)
        self._touched = MemoryNotes[None]()
        for each in drawn:
            self._touch(each)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _tensors_in(args, *(kwargs or {}).values())
        if not any(each in self._touched for each in given):
            return result
        if _gives_views(func):
            return result  # of memory that is known
        for each in _tensors_in(result):
            if each.is_floating_point() or each.is_complex():
                each.mul_(self._factors(each))
                self._touch(each)
        return result

    def _touch(self, tensor: torch.Tensor) -> None:
        if _is_real(tensor):
            self._touched[tensor] = None

    def _factors(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what the numbers of a result are multiplied by to err."""
        limits = torch.finfo(tensor.real.dtype if tensor.is_complex() else tensor.dtype)
        # Towards zero, so that the largest numbers stay finite.
        factors = self._draw(tensor.shape).mul(-_ULPS * limits.eps).add_(1)
        if tensor.is_complex():
            return factors
        largest = min(_EXACT, limits.max)
        return factors.masked_fill_(tensor.clamp(-largest, largest).round_() == tensor, 1)

    def _draw(self, shape: torch.Size) -> torch.Tensor:
        number = shape.numel()
        if number > len(self._drawn):
            most = max(number, _DRAWN)
            self._drawn = torch.rand(most, generator=self._draws, dtype=torch.float64)
        found, self._drawn = self._drawn[:number], self._drawn[number:]
        return found.view(shape)


def _tensors_in(*values: object) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments or results of an operation, also of lists."""
    for value in values:
        if _is_real(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(*value)


@functools.cache
def _gives_views(func: Any) -> bool:
    """Whether an operation gives views of its arguments, rather than writing to them."""
    aliases = [each.alias_info for each in func._schema.returns]
    return any(each is not None and not each.is_write for each in aliases)


class Tolerance:
    """How far results may be from those of the whole.

    Args:
        results: of the whole.
        moved: the same, computed with errors, as often as that was done.
    """

    def __init__(
        self, results: Iterable[torch.Tensor], moved: Iterable[Iterable[torch.Tensor]]
    ) -> None:
        self._results = list(results)
        self._bounds = [_MARGIN * _unit(each) for each in self._results]
        for again in moved:
            pairs = zip(self._results, again, strict=True)
            found = [_MARGIN * distance(*pair) for pair in pairs]
            self._bounds = [max(pair) for pair in zip(self._bounds, found, strict=True)]

    def is_vague(self, number: int) -> bool:
        """Whether rounding moves a result so much that no other could be told from it."""
        return not self._bounds[number] <= _VAGUE * _norm(self._results[number])

    def holds(self, number: int, got: torch.Tensor) -> bool:
        """Whether a result differs from that of the whole by no more than rounding."""
        return distance(got, self._results[number]) <= self._bounds[number]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the norm of a difference; infinite where numbers that are exact differ."""
    if got.shape != want.shape:
        return torch.inf
    if not want.is_floating_point() and not want.is_complex():
        return 0.0 if torch.equal(got, want) else torch.inf
    with torch.no_grad():
        return float(torch.linalg.vector_norm(got - want))


def _norm(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return 0.0
    return float(torch.linalg.vector_norm(tensor.detach()))


def _unit(tensor: torch.Tensor) -> float:
    """Returns what rounding moves a result by at least, if its last operation errs."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return 0.0
    return torch.finfo(tensor.dtype).eps * _norm(tensor)


def _is_real(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
