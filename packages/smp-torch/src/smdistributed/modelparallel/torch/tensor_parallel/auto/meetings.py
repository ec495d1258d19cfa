"""Where code brings slices together with what every rank has whole: each takes its own part of it.

Slopes, biases and gates of one number a head are whole on each rank, whatever they come from:
parameters, buffers, arguments or what code has computed. So are sizes that are written as numbers.
Where a function would refuse such a tensor or size beside a slice, as it is as many times as large
as there are ranks, it gets the own part. A proof notes what that is, by function and place, and
what it has not seen is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensors.functions import (
    BROADCASTING,
    CONCATENATING,
    EXPANDING,
    MULTIPLYING_MATRICES,
    UNFLATTENING,
    VIEWING,
    writes_to_first,
)

Shape = tuple[int, ...]
_EINSUM = torch.einsum


class Cut(NamedTuple):
    """What of a call is cut.

    Attributes:
        place: of the tensor among those of the call; -1: it is a size.
        dim: of the tensor, counted from the last one; or the place of the size, from the first.
        whole: how many heads or channels are cut; 0 where examples may be among them.
        is_folded: the dim is all examples with all heads, of which the heads are cut.
    """

    place: int
    dim: int
    whole: int
    is_folded: bool = False


class Meeting(NamedTuple):
    """A call in which slices meet what is whole: the function, and what of it is cut."""

    function: str
    cuts: tuple[Cut, ...]


def examples_of(tensors: Sequence[torch.Tensor]) -> int:
    """Returns how many examples a call with some tensors has; 0 if nothing tells."""
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 0


@dataclass
class Meetings:
    """Gives functions their own parts in one call of a split module.

    Args:
        size: how many ranks there are.
        rank: which of them this is.
        examples: how many the call has.
        known: what a proof has found; None: this is a proof.
        folds: a proof takes the first dim of a tensor, where it can be that, for all examples with
            all heads.

    Attributes:
        found: the meetings up to now, each once: code may go through a loop as often as it likes.
        may_fold: a proof could have taken a dim so.
    """

    size: int
    rank: int
    examples: int
    known: Sequence[Meeting] | None = None
    folds: bool = False
    found: list[Meeting] = field(default_factory=list)
    may_fold: bool = False

    def copy(self) -> Meetings:
        """Returns one that goes on from where this one is."""
        return Meetings(
            *(self.size, self.rank, self.examples, self.known, self.folds), list(self.found)
        )

    def met(self, function: Any, args: Sequence[Any], kwargs: Any) -> tuple[Sequence[Any], Any]:
        """Returns what a function is to be called with.

        Raises:
            SMPError: its slices meet something else than where they were proven.
        """
        if function in _WITH_SIZES:
            return self._with_own_sizes(function, args), kwargs
        if function not in _WITH_TENSORS:
            return args, kwargs
        places = list(_tensors_of(args, kwargs))
        shapes = [tuple(tensor.shape) for _, tensor in places]
        wanted = _too_large(function, args, kwargs, shapes, self.size)
        if not wanted:
            return args, kwargs
        cuts = tuple(self._cut(function, place, dim, shapes[place]) for place, dim in wanted)
        self._note(Meeting(_name_of(function), cuts))
        made, named = list(args), dict(kwargs)
        for cut in cuts:
            where, tensor = places[cut.place]
            _put(made, named, where, self._own_part(tensor, cut))
        return made, named

    def _cut(self, function: Any, place: int, dim: int, shape: Shape) -> Cut:
        is_first = dim == -len(shape) and len(shape) > 1
        can_fold = is_first and self.examples > 0 and not shape[0] % (self.examples * self.size)
        self.may_fold |= can_fold
        folded = Cut(place, dim, 0, is_folded=True)
        plain = Cut(place, dim, shape[dim])
        if self.known is None:
            return folded if can_fold and self.folds else plain
        alike = (each for each in self.known if each.function == _name_of(function))
        return folded if any(folded in each.cuts for each in alike) else plain

    def _own_part(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        if cut.is_folded:
            if not self.examples or tensor.shape[0] % (self.examples * self.size):
                raise ValueError("a first dim is no longer all examples with all heads")
            apart = tensor.reshape(self.examples, -1, *tensor.shape[1:])
            return self._own_part(apart, Cut(cut.place, 1, apart.shape[1])).flatten(0, 1)
        own = tensor.shape[cut.dim] // self.size
        return tensor.narrow(cut.dim, self.rank * own, own)

    def _with_own_sizes(self, function: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the arguments of what is given sizes, one of which may count the whole."""
        given = _Sizes.of(function, args)
        if given is None or not given.count_whole(self.size):
            return args
        place = given.guess(self)
        if place is None or given.sizes[place] % self.size:
            return args
        whole = given.sizes[place] if place else 0
        self._note(Meeting(_name_of(function), (Cut(-1, place, whole),)))
        return given.cut(place, self.size)

    def _note(self, meeting: Meeting) -> None:
        """Takes note of a meeting; where some are known it must be one of them."""
        if self.known is not None and meeting not in self.known:
            raise SMPError(
                "slices of a module meet what is whole in another way than when they were proven "
                f"({meeting.function}); exclude the module: "
                "smp.set_tensor_parallelism(module, enabled=False)."
            )
        if meeting not in self.found:
            self.found.append(meeting)


@dataclass
class _Sizes:
    """The sizes that a function is to give a tensor.

    Attributes:
        args: of the function.
        first: where sizes begin in these.
        is_listed: they are one list there.
        before: the sizes that the tensor has in their place.
        sizes: the new ones.
        repeats: dims of one number are repeated; else each number has its place.
    """

    args: Sequence[Any]
    first: int
    is_listed: bool
    before: Shape
    sizes: Shape
    repeats: bool

    @classmethod
    def of(cls, function: Any, args: Sequence[Any]) -> _Sizes | None:
        """Takes apart what a function is given; None if that is no tensor with sizes."""
        first = 2 if function in UNFLATTENING else 1
        if len(args) <= first or not isinstance(args[0], torch.Tensor):
            return None
        is_listed = isinstance(args[first], tuple | list)
        sizes = tuple(args[first] if is_listed else args[first:])
        if not all(type(each) is int and each > 0 for each in sizes):
            return None
        shape = tuple(args[0].shape)
        if function in UNFLATTENING:
            shape = (shape[args[1]],) if type(args[1]) is int else ()
        return cls(args, first, is_listed, shape, sizes, function in EXPANDING)

    def count_whole(self, size: int) -> bool:
        """Whether they are those of as many slices as there are ranks."""
        if self.repeats:
            return self._repeated(size) is not None
        return math.prod(self.sizes) == size * math.prod(self.before)

    def guess(self, met: Meetings) -> int | None:
        """Returns the place of the size that counts heads or channels: the first that may be it."""
        if self.repeats:
            return self._repeated(met.size)
        may_be = [
            place
            for place in range(_same_in_front(self.before, self.sizes), len(self.sizes))
            if not self.sizes[place] % met.size
            and not (place == 0 and self.sizes[0] == met.examples)
        ]
        # One of as many as there are ranks rather counts what is fused.
        several = [place for place in may_be if self.sizes[place] > met.size]
        return next(iter((*several, *may_be)), None)

    def cut(self, place: int, size: int) -> Sequence[Any]:
        """Returns the arguments with the own part of a size."""
        own = [each // size if n == place else each for n, each in enumerate(self.sizes)]
        return [*self.args[: self.first], *([tuple(own)] if self.is_listed else own)]

    def _repeated(self, size: int) -> int | None:
        """Returns the place of a size that is that of the tensor, but for the whole."""
        offset = len(self.sizes) - len(self.before)
        places = range(max(offset, 0), len(self.sizes))
        pairs = [(place, self.before[place - offset]) for place in places]
        found = [place for place, own in pairs if own > 1 and self.sizes[place] == own * size]
        return found[0] if len(found) == 1 else None


def _same_in_front(before: Shape, after: Shape) -> int:
    """Returns how many sizes hold what as many or others held before, from the first on."""
    same, place, number, left, right = 0, 0, 0, 1, 1
    while place < len(before) and number < len(after):
        if left <= right:
            left *= before[place]
            place += 1
        else:
            right *= after[number]
            number += 1
        if left == right and place < len(before):  # else nothing is left for the one that is cut
            same, left, right = number, 1, 1
    return same


def _too_large(
    function: Any, args: Sequence[Any], kwargs: Any, shapes: Sequence[Shape], size: int
) -> list[tuple[int, int]]:
    """Returns which tensors of a call are too large, and their dims, counted from the last one."""
    if function is _EINSUM:
        return _too_large_for_letters(args, shapes, size)
    left_out: set[int] = set()
    if function in MULTIPLYING_MATRICES:
        left_out = {-1, -2}
    elif function in CONCATENATING and shapes:
        along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        left_out = {along if along < 0 else along - len(shapes[0])}
    dims = range(-1, -1 - max(map(len, shapes), default=0), -1)
    found = [
        (place, dim)
        for dim in dims
        if dim not in left_out
        for place in _larger({n: s[dim] for n, s in enumerate(shapes) if len(s) >= -dim}, size)
    ]
    writes = writes_to_first(function)
    return [] if writes and any(place == 0 for place, _ in found) else found


def _too_large_for_letters(
    args: Sequence[Any], shapes: Sequence[Shape], size: int
) -> list[tuple[int, int]]:
    equation = args[0] if args else None
    if not isinstance(equation, str) or "." in equation:
        return []
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if [len(term) for term in terms] != [len(shape) for shape in shapes]:
        return []
    found = []
    for letter in sorted(set("".join(terms))):
        dims = {n: term.index(letter) for n, term in enumerate(terms) if letter in term}
        sizes = {n: shapes[n][dim] for n, dim in dims.items()}
        found += [(n, dims[n] - len(shapes[n])) for n in _larger(sizes, size)]
    return found


def _larger(sizes: dict[int, int], size: int) -> list[int]:
    """Returns which of some sizes are those of the whole beside slices."""
    several = sorted({each for each in sizes.values() if each != 1})
    if len(several) != 2 or several[1] != several[0] * size:
        return []
    return [place for place, each in sizes.items() if each == several[1]]


#: Where a tensor is among arguments: its place or its name, and its place in a list there.
_Where = tuple[int | str, int | None]


def _tensors_of(args: Sequence[Any], kwargs: Any) -> Iterator[tuple[_Where, torch.Tensor]]:
    for where, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            yield (where, None), value
        elif isinstance(value, tuple | list):
            for place, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    yield (where, place), each


def _put(args: list[Any], kwargs: dict[str, Any], where: _Where, tensor: torch.Tensor) -> None:
    """Puts another tensor among arguments."""
    owner: Any = kwargs if isinstance(where[0], str) else args
    if where[1] is None:
        owner[where[0]] = tensor
        return
    several = list(owner[where[0]])
    several[where[1]] = tensor
    owner[where[0]] = several


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", function))


_WITH_SIZES = VIEWING | UNFLATTENING | EXPANDING
_WITH_TENSORS = BROADCASTING | MULTIPLYING_MATRICES | CONCATENATING | {_EINSUM}
