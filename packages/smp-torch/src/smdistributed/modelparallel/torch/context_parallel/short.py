"""The same call with a short sequence, which is tried in place of one with a long sequence.

A proof copies and compares all tensors of a call several times. The logits of 65,536 tokens and
32,000 words are 8 GiB in fp32, and would be 90 in proofs; those of 32 tokens prove the same, if the
call does nothing that depends on how long the sequence is. Its lengths come from its tensors, and
from numbers in its arguments:

- A number that Python gave for the whole sequence, and half of it for the half that each of two
  ranks has, is a length: it is shortened too.
- A number that is the same for both, such as the 32,000 of ``logits.view(-1, 32000)``, is none; but
  what is done with it may still depend on the length, as in ``x[:, :40]``. So the call is also run
  without numbers, long and short: what has large numbers must be sizes in all operations, or act
  along a dim that is as long in both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import (
    TorchDispatchMode,
    past_all_modes,
    pytree,
)
from smdistributed.modelparallel.torch.context_parallel.calls import put_together
from smdistributed.modelparallel.torch.context_parallel.layout import BLOCKS, Layout, Window
from smdistributed.modelparallel.torch.context_parallel.numbers import Given
from smdistributed.modelparallel.torch.context_parallel.proof import Proof

#: A call with more numbers than these has a long sequence.
LONG = 2**24
#: So many tokens are in a block of the short sequence. Numbers below are no lengths.
_BLOCK = 8
#: Arguments of operations of ATen that are sizes, values of indices, and dims. What is not declared
#: to be whole numbers is a value too, such as what is added to a tensor.
_SIZES = {"size", "normalized_shape"}
_VALUES = {"ignore_index", "padding_idx"}
_DIMS = {"dim", "dims", "dimension"}
_WHOLE_NUMBERS = "int"
#: Where a slice ends that has no end.
_NO_END = 2**63 - 1


class Short(NamedTuple):
    """A call with a short sequence.

    Attributes:
        given: its tensors.
        whole: the other arguments for the whole.
        own: the same for the piece of each rank.
        windows: on the short sequence, and on the long one.
    """

    given: list[Given]
    whole: tuple[Any, ...]
    own: tuple[tuple[Any, ...], ...]
    windows: dict[Window | None, Window | None]

    def lengthened(self, proof: Proof) -> Proof:
        """Returns the proof of the call with the long sequence."""

        def long(layout: Layout | None) -> Layout | None:
            return layout and replace(layout, window=self.windows[layout.window])

        results = tuple(replace(each, layout=long(each.layout)) for each in proof.results)
        return Proof(tuple(map(long, proof.layouts)), results)


class _Length(NamedTuple):
    """Shortens numbers that are lengths.

    Attributes:
        long: length of the sequence.
        short: that of the short one.
        window: what there is of the sequence; None for all.
        short_window: on the short one.
        num_ranks: that share it.
    """

    long: int
    short: int
    window: Window | None
    short_window: Window | None
    num_ranks: int

    def of_leaves(
        self, whole: Sequence[Any], own: Sequence[Sequence[Any]]
    ) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...]] | None:
        """Returns arguments for the short sequence; None if it is not known which these are."""
        wholes, owns = [], []
        for rank, each in enumerate(own):
            found = [
                self.of_numbers(one, other, rank) for one, other in zip(whole, each, strict=True)
            ]
            if None in found:
                return None
            pairs = [pair for pair in found if pair is not None]
            wholes.append(tuple(one for one, _ in pairs))
            owns.append(tuple(other for _, other in pairs))
        return wholes[0], tuple(owns)

    def of_numbers(self, whole: Any, own: Any, rank: int) -> tuple[Any, Any] | None:
        """Returns one argument for the short sequence, and for the piece of a rank."""
        if type(whole) is not type(own):
            return None
        if isinstance(whole, slice):
            ends = self._joined(_ends(whole), _ends(own), rank)
            return None if ends is None else (slice(*ends[0]), slice(*ends[1]))
        if isinstance(whole, torch.Size):
            sizes = self._joined(whole, own, rank)
            return None if sizes is None else (torch.Size(sizes[0]), torch.Size(sizes[1]))
        if type(whole) is not int:
            return (whole, own) if whole == own else None
        if whole == own:
            return None if abs(whole) >= _BLOCK and whole % self.long == 0 else (whole, own)
        shortened, rest = divmod(whole * self.short, self.long)
        of_piece = self._of_piece(whole, self.long, self.window, rank)
        short_of_piece = self._of_piece(shortened, self.short, self.short_window, rank)
        if own != of_piece or rest or short_of_piece is None:
            return None
        return shortened, short_of_piece

    def _of_piece(self, number: int, length: int, window: Window | None, rank: int) -> int | None:
        """Returns a number that goes by the length, for the piece of a rank."""
        piece = Layout(0, 1, window).size_of(length, rank, self.num_ranks)
        found, rest = divmod(number * piece, length)
        return None if rest else found

    def _joined(
        self, whole: Sequence[Any], own: Sequence[Any], rank: int
    ) -> tuple[list[Any], list[Any]] | None:
        if len(whole) != len(own):
            return None
        found = [self.of_numbers(one, other, rank) for one, other in zip(whole, own, strict=True)]
        if None in found:
            return None
        pairs = [each for each in found if each is not None]
        return [one for one, _ in pairs], [other for _, other in pairs]

    def of_tensor(self, given: Given, *, wholes: bool) -> Given | None:
        """Returns a tensor for the short sequence; None if that has none.

        Args:
            given: with the long one.
            wholes: a tensor that may be cut, and need not be, is shortened too, such as labels
                beside a piece of logits; else it has no sequence, such as a weight.
        """
        layout = given.layouts[0]
        if layout is None and wholes:
            layout = next((each for each in given.layouts if each is not None), None)
        if layout is None:
            return replace(given, layouts=(None,))
        shape = list(given.shape)
        shape[layout.dim], rest = divmod(shape[layout.dim] * self.short, self.long)
        ways = [
            each and replace(each, window=self.short_window)
            for each in given.layouts[: len(given.layouts) if wholes else 1]
        ]
        layouts = tuple(
            each
            for each in ways
            if each is None
            or (each.dim == layout.dim and each.divides(shape[layout.dim], self.num_ranks))
        )
        if rest or not any(layouts):
            return None
        return replace(given, shape=torch.Size(shape), layouts=layouts)


def shortened(
    function: Callable[..., Any],
    spec: Any,
    whole: Sequence[Any],
    own: Sequence[Sequence[Any]],
    given: Sequence[Given],
    length: int,
    num_ranks: int,
) -> Iterator[Short]:
    """Yields a call with a short sequence that shows what one with a long one does.

    Nothing, if the sequence is not long, or what is done may depend on its length; twice, if some
    tensors may have a sequence, or none.

    Args:
        function: that is called.
        spec: the structure of its arguments.
        whole: the arguments for the whole, with holes for tensors.
        own: the same for the piece of each rank.
        given: its tensors, with the long sequence.
        length: of the long sequence.
        num_ranks: that share it.
    """
    windows = {each.window for form in given for each in form.layouts if each is not None}
    if sum(each.shape.numel() for each in given) < LONG or len(windows) != 1:
        return
    (window,) = windows
    lengths = _lengths(window, length, num_ranks)
    found = None if lengths is None else lengths.of_leaves(whole, own)
    if lengths is None or found is None:
        return
    of_whole, of_own = found
    has_large = any(map(_has_large, whole))
    in_long = _operations(function, spec, whole, given) if has_large else None
    for wholes in (False, True):
        tensors = [lengths.of_tensor(each, wholes=wholes) for each in given]
        found_tensors = [each for each in tensors if each is not None]
        if len(found_tensors) != len(given):
            continue
        in_short = _operations(function, spec, of_whole, found_tensors) if has_large else None
        if not has_large or _are_alike(in_long, in_short):
            yield Short(found_tensors, of_whole, of_own, {lengths.short_window: window})


def _lengths(window: Window | None, length: int, num_ranks: int) -> _Length | None:
    """Returns what shortens the numbers of a call; None if its sequence is short."""
    short = BLOCKS * num_ranks * _BLOCK
    if window is None:
        return _Length(length, short, None, None, num_ranks) if length > short else None
    ends = [_on_short(each, window.frame, short) for each in (window.start, window.stop)]
    if window.frame <= short or None in ends or ends[0] == ends[1]:
        return None
    on_short = Window(short, *(each for each in ends if each is not None))
    return _Length(len(window), len(on_short), window, on_short, num_ranks)


def _on_short(place: int, frame: int, short: int) -> int | None:
    """Returns where a place in a sequence is in a short one; None if it is nowhere."""
    if abs(place) < _BLOCK:
        return place
    if abs(place - frame) < _BLOCK:
        return place - frame + short
    found, rest = divmod(place * short, frame)
    return None if rest else found


def fits(proof: Proof, shapes: Sequence[torch.Size], num_ranks: int) -> bool:
    """Whether results of the long sequence can be cut as those of a short one.

    A window of two tokens fits into a block of eight, and not into one of 1001.

    Args:
        proof: of the call with a short sequence.
        shapes: of the results of the one with a long sequence.
        num_ranks: that share it.
    """
    return all(
        result.layout is None or result.layout.divides(shape[result.layout.dim], num_ranks)
        for result, shape in zip(proof.results, shapes, strict=False)
    )


class _Shape:
    """Stands for a tensor among the arguments of an operation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.sizes = tensor.shape


class _Operation(NamedTuple):
    """An operation of ATen.

    Attributes:
        function: of ATen.
        arguments: tensors and whole numbers, by their names.
    """

    function: Any
    arguments: dict[str, Any]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations that a call makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        declared = {each.name: str(each.type) for each in func._schema.arguments}
        given = {**dict(zip(declared, args, strict=False)), **(kwargs or {})}
        arguments = {
            name: _described(value)
            for name, value in given.items()
            if isinstance(value, torch.Tensor) or _WHOLE_NUMBERS in declared[name].lower()
        }
        self.found.append(_Operation(func, arguments))
        return func(*args, **(kwargs or {}))


def _operations(
    function: Callable[..., Any], spec: Any, leaves: Sequence[Any], given: Sequence[Given]
) -> list[_Operation] | None:
    """Returns what a call does; None if it does not run without numbers."""
    metas = [torch.empty(each.shape, dtype=each.like.dtype, device="meta") for each in given]
    operations = _Operations()
    with past_all_modes(), torch.no_grad(), contextlib.suppress(Exception):
        args, kwargs = put_together(spec, leaves, metas)
        with operations:
            function(*args, **kwargs)
        return operations.found
    return None


def _are_alike(long: list[_Operation] | None, short: list[_Operation] | None) -> bool:
    """Whether operations with a long sequence are known to do the same as with a short one."""
    if long is None or short is None:
        return False
    return len(long) == len(short) and all(
        one.function is other.function and _is_alike(one.arguments, other.arguments)
        for one, other in zip(long, short, strict=True)
    )


def _is_alike(long: dict[str, Any], short: dict[str, Any]) -> bool:
    if _acts_elsewhere(long, short):
        return True
    others = [value for name, value in long.items() if name not in _SIZES | _VALUES | _DIMS]
    return not any(type(each) is int and _is_large(each) for each in pytree.tree_leaves(others))


def _acts_elsewhere(long: dict[str, Any], short: dict[str, Any]) -> bool:
    """Whether an operation acts along dims that are as long with a long sequence."""
    found = [dim for name in _DIMS & long.keys() for dim in pytree.tree_leaves(long[name])]
    before, after = long.get("self"), short.get("self")
    if not found or not isinstance(before, _Shape) or not isinstance(after, _Shape):
        return False
    return all(before.sizes[dim] == after.sizes[dim] for dim in found)


def _described(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, _Shape, value)


def _has_large(leaf: Any) -> bool:
    """Whether an argument has a number that may have to do with a length."""
    if isinstance(leaf, slice):
        leaf = _ends(leaf)
    numbers = leaf if isinstance(leaf, tuple) else (leaf,)
    return any(type(each) is int and _is_large(each) for each in numbers)


def _is_large(number: int) -> bool:
    return _BLOCK <= abs(number) < _NO_END


def _ends(leaf: slice) -> tuple[Any, Any, Any]:
    return leaf.start, leaf.stop, leaf.step
