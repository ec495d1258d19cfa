"""A call of a function of torch, as data that can be compared, and made with other tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.context_parallel.layout import Layout

#: By whom a tensor was made: numbers of a call and of its result; of all that gave it back.
Makers = frozenset[tuple[int, int]]


#: So many choices of places of one number are tried.
_MOST_CHOICES = 8


class Form(NamedTuple):
    """What is known of a tensor of a call but for its numbers.

    Attributes:
        whole: its shape, if one process had the whole sequence.
        own: the shape of what this rank has.
        layout: how it is cut; None if this rank has the whole.
    """

    whole: torch.Size
    own: torch.Size
    layout: Layout | None


class Hole(NamedTuple):
    """Stands for a tensor in the arguments of a call.

    Attributes:
        number: of the tensor among those of the call.
    """

    number: int


@dataclass(frozen=True)
class Call:
    """A call that was made.

    Attributes:
        function: what was called.
        spec: the structure of the arguments.
        leaves: they, with a ``Hole`` for each tensor.
        kinds: the types of these: 1 and True are equal, and not the same.
        shapes: of the tensors, with their types.
        makers: of each tensor; empty for one that was there before.
    """

    function: Any
    spec: Any
    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]
    makers: tuple[Makers, ...]

    def is_alike(self, other: Call) -> bool:
        """Whether this is the same call, but for numbers and lengths."""
        return (
            self.function == other.function
            and self.spec == other.spec
            and self.kinds == other.kinds
            and all(
                one == another
                for one, another in zip(self.leaves, other.leaves, strict=True)
                if isinstance(one, bool | str | torch.dtype)
            )
            and all(
                bool(one & another) or one == another
                for one, another in zip(self.makers, other.makers, strict=True)
            )
        )


def taken_apart(args: Any, kwargs: Any) -> tuple[Any, list[Any], list[torch.Tensor]]:
    """Returns the structure of arguments, their leaves with holes, and the tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
    tensors: list[torch.Tensor] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[place] = Hole(len(tensors))
            tensors.append(leaf)
    return spec, leaves, tensors


def put_together(spec: Any, leaves: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Returns arguments with tensors in the holes."""
    filled = [tensors[leaf.number] if isinstance(leaf, Hole) else leaf for leaf in leaves]
    return pytree.tree_unflatten(filled, spec)  # type: ignore[no-any-return]


def _is_leaf(value: Any) -> bool:
    # Sizes are numbers: one leaf compares faster than each of them.
    return isinstance(value, torch.Size)


def results_of(result: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a function of torch gives."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


class Length(NamedTuple):
    """How long sequences are.

    Attributes:
        whole: of the whole.
        pieces: of the piece of each rank.
    """

    whole: int
    pieces: tuple[int, ...]


def shorter_by_turns(
    leaves: tuple[Any, ...], lengths: Sequence[Length]
) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """Yields arguments of each rank: with the length of its piece where there is that of the whole.

    Or a multiple of it: sequences lie one after the other. Another number may be one by chance, so
    each choice of places is tried, and none.
    """
    num_ranks = len(lengths[0].pieces)
    yield (leaves,) * num_ranks
    places = [
        (at, inner, length)
        for at, leaf in enumerate(leaves)
        for inner, length in _lengths_in(leaf, lengths)
    ]
    for count in range(len(places), 0, -1):
        for chosen in itertools.islice(itertools.combinations(places, count), _MOST_CHOICES):
            every = [list(leaves) for _ in range(num_ranks)]
            for at, inner, length in chosen:
                for own, piece in zip(every, length.pieces, strict=True):
                    own[at] = _shortened(own[at], inner, length.whole, piece)
            yield tuple(map(tuple, every))


def _lengths_in(leaf: Any, lengths: Sequence[Length]) -> Iterator[tuple[int, Length]]:
    """Yields the places in a leaf at which there is a length, or a multiple of it."""
    for place, each in enumerate(_numbers_of(leaf)):
        for length in lengths:
            if type(each) is int and each > 0 and each % length.whole == 0:
                yield place, length
                break


def _numbers_of(leaf: Any) -> Sequence[Any]:
    if isinstance(leaf, slice):
        return leaf.start, leaf.stop
    return leaf if isinstance(leaf, tuple) else (leaf,)


def _shortened(leaf: Any, place: int, whole: int, piece: int) -> Any:
    numbers = [
        each // whole * piece if at == place else each for at, each in enumerate(_numbers_of(leaf))
    ]
    if isinstance(leaf, slice):
        start, stop = numbers
        return slice(start, stop, leaf.step)
    return type(leaf)(numbers) if isinstance(leaf, tuple) else numbers[0]
