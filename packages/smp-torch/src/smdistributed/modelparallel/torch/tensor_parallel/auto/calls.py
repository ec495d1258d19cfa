"""What a module is called with: tensors and plain values, and the form of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import pytree

_CONTAINERS = (tuple, list, dict)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
#: Samples of calls have so many examples, and sequences of this length.
_EXAMPLES, _LENGTH = 2, 6
#: Those with more have at least so many, and at most, if calls have; odd, as the others are even.
_MORE_EXAMPLES = 33, 255


@dataclass(frozen=True)
class TensorForm:
    """The form of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> object:
        """What calls must have in common that are computed in one way; sizes may differ."""
        return self.dtype, tuple(size == 1 for size in self.shape)

    def sample(self, draws: torch.Generator, size: float = 1.0) -> torch.Tensor:
        """Returns random values, in single precision; numbers that are not whole of some size."""
        if self.dtype == torch.bool:
            mask = torch.rand(self.shape, generator=draws) < 0.7
            if mask.dim():  # a row without any would be undefined, whichever of both hides
                mask[..., -1:] = False
                mask[..., :1] = True
            return mask
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.randint(0, 2, self.shape, generator=draws).to(self.dtype)
        wide = torch.complex64 if self.dtype.is_complex else torch.float32
        return torch.randn(self.shape, generator=draws, dtype=wide) * size


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor in what ranks tell each other of their calls.

    Attributes:
        dtype, num_dims, requires_grad: of the tensor.
        same_as: the path before it that has the same tensor.
    """

    dtype: torch.dtype
    num_dims: int
    requires_grad: bool
    same_as: str | None = None


class Call:
    """The arguments of a call, or its result, taken apart.

    Args:
        given: arguments by position and by keyword, or a result; with tensors, or holes for them.

    Raises:
        UnsupportedError: there are objects in it that a call cannot be repeated with.

    Attributes:
        leaves: tensors and plain values, in order.
        paths: where each tensor is.
        same: of a tensor that is there before, the path where it is first.
    """

    def __init__(self, given: Any) -> None:
        listed, self._spec = pytree.tree_flatten_with_path(
            given, is_leaf=lambda each: type(each) not in _CONTAINERS
        )
        self.leaves: list[Any] = []
        self.paths: dict[str, int] = {}
        self.same: dict[str, str] = {}
        first: dict[int, str] = {}
        for place, (path, leaf) in enumerate(listed):
            if isinstance(leaf, torch.Tensor | Hole):
                name = pytree.keystr(path)
                self.paths[name] = place
                before = first.setdefault(id(leaf), name)
                if isinstance(leaf, Hole):
                    before = leaf.same_as or name
                if before != name:
                    self.same[name] = before
            elif _is_empty_cache(leaf):
                leaf = None  # stays empty: keys and values lie on several ranks
            elif not isinstance(leaf, _PLAIN):
                raise UnsupportedError(
                    "a module that is split takes and returns tensors and plain values, and no "
                    "cache that is filled (use_cache=False); received a "
                    f"{type(leaf).__qualname__}."
                )
            self.leaves.append(leaf)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in it."""
        return [self.leaves[place] for place in self.paths.values()]

    @property
    def forms(self) -> list[TensorForm]:
        """Their forms."""
        return [TensorForm(tuple(each.shape), each.dtype) for each in self.tensors]

    @property
    def holes(self) -> list[Hole]:
        """What stands for them."""
        return [
            each
            if isinstance(each, Hole)
            else Hole(
                each.dtype,
                each.dim(),
                each.requires_grad and torch.is_grad_enabled(),
                self.same.get(name),
            )
            for name, each in zip(self.paths, self.tensors, strict=True)
        ]

    @property
    def structure(self) -> str:
        """What is the same for calls of one form, but for the tensors."""
        rest = [
            "tensor"
            if isinstance(leaf, torch.Tensor | Hole)
            else type(leaf).__name__
            if isinstance(leaf, int | float) and not isinstance(leaf, bool)
            else repr(leaf)
            for leaf in self.leaves
        ]
        return f"{self._spec}{rest}{self.same}"

    def skeleton(self) -> Any:
        """Returns the whole with holes in it."""
        return self.filled(self.holes)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Returns the whole with other tensors in it."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.paths.values(), tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)

    def sample(self, forms: Sequence[TensorForm], draws: torch.Generator, size: float = 1.0) -> Any:
        """Returns arguments of this form, with random values of some size."""
        made: dict[str, torch.Tensor] = {}
        for path, form in zip(self.paths, forms, strict=True):
            made[path] = made[self.same[path]] if path in self.same else form.sample(draws, size)
        return self.filled(list(made.values()))


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Returns the tensors in arguments or results, in order."""
    return [each for each in pytree.tree_leaves(nested) if isinstance(each, torch.Tensor)]


def shrunk(forms: Sequence[TensorForm], kept: frozenset[int]) -> list[TensorForm]:
    """Returns the forms of a call with fewer examples, and shorter sequences if they are long.

    Args:
        forms: of the tensors; the first one has the examples along dim 0, and if it has three
            dims or more the sequence along dim 1.
        kept: sizes that mean something else: of weights, and of heads.
    """
    return _resized(forms, kept, lambda number: min(number, _EXAMPLES))


def with_more_examples(
    forms: Sequence[TensorForm], kept: frozenset[int]
) -> list[TensorForm] | None:
    """Returns the same with an odd number of examples, which is larger; None where it is not."""
    fewest, most = _MORE_EXAMPLES
    found = _resized(forms, kept, lambda number: min(max(number, fewest) | 1, most))
    return found if found != shrunk(forms, kept) else None


def _resized(
    forms: Sequence[TensorForm], kept: frozenset[int], resize: Callable[[int], int]
) -> list[TensorForm]:
    if not forms or not forms[0].shape:
        return list(forms)
    sizes = {}
    first = forms[0].shape
    if len(first) > 2 and first[1] > 4 * _LENGTH and first[1] not in kept:
        sizes[first[1]] = _LENGTH
    if first[0] > 1 and first[0] not in kept and first[0] not in first[1:]:
        sizes[first[0]] = resize(first[0])
    return [
        TensorForm(tuple(sizes.get(size, size) for size in form.shape), form.dtype)
        for form in forms
    ]


def _is_empty_cache(leaf: object) -> bool:
    """Whether an object is a cache of Transformers that has nothing yet."""
    if not type(leaf).__module__.startswith("transformers."):
        return False
    length = getattr(leaf, "get_seq_length", None)
    return length is not None and int(length()) == 0
