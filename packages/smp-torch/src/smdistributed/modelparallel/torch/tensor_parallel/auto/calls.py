"""What a module is called with: tensors and plain values, and the form of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import pytree

#: What to do where keys and values, which lie on several ranks, would be kept for later calls.
WITHOUT_CACHE = "call it between steps in torch.no_grad(), or pass use_cache=False"
_CONTAINERS = (tuple, list, dict)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class TensorForm:
    """The form of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> tuple[torch.dtype, tuple[bool, ...]]:
        """What calls must have in common that are computed in one way; sizes may differ."""
        return self.dtype, tuple(size == 1 for size in self.shape)

    def sample(self, draws: torch.Generator, dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
        """Returns random values; numbers that are not whole in some precision, of some size."""
        if self.dtype == torch.bool:
            mask = torch.rand(self.shape, generator=draws) < 0.7
            if mask.dim():  # a row without any would be undefined, whichever of both hides
                mask[..., -1:] = False
                mask[..., :1] = True
            return mask
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.randint(0, 2, self.shape, generator=draws).to(self.dtype)
        wide = dtype.to_complex() if self.dtype.is_complex else dtype
        return torch.randn(self.shape, generator=draws, dtype=wide) * size


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor in what ranks tell each other of their calls.

    Attributes:
        dtype, num_dims, requires_grad: of the tensor.
        same_as: the path before it that has the same tensor.
        order: its dims in the order of its memory, if another one.
    """

    dtype: torch.dtype
    num_dims: int
    requires_grad: bool
    same_as: str | None = None
    order: tuple[int, ...] | None = None


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
                    f"cache that is filled: {WITHOUT_CACHE}; received a "
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
                _order_of(each),
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

    def sample(
        self,
        forms: Sequence[TensorForm],
        draws: torch.Generator,
        dtype: torch.dtype,
        size: float = 1.0,
    ) -> Any:
        """Returns arguments of this form, with random values in some precision, of some size."""
        made: dict[str, torch.Tensor] = {}
        for path, form in zip(self.paths, forms, strict=True):
            first = made.get(self.same.get(path, ""))
            made[path] = form.sample(draws, dtype, size) if first is None else first
        return self.filled(list(made.values()))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor has not its memory for itself, as one with every second row, or one row."""
    return not tensor.is_contiguous() and _strides_like(tensor) != tensor.stride()


def _order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the dims in the order of memory; None if that is theirs."""
    if tensor.is_contiguous():
        return None
    strides = _strides_like(tensor)
    order = tuple(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))
    return None if order == tuple(range(tensor.dim())) else order


def _strides_like(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns how torch lays out what has the form of a tensor, as what is dropped from it."""
    return torch.empty_like(tensor, device="meta").stride()


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Returns the tensors in arguments or results, in order."""
    return [each for each in pytree.tree_leaves(nested) if isinstance(each, torch.Tensor)]


def caches_in(nested: Any) -> list[Any]:
    """Returns the caches of Transformers in arguments."""
    leaves = pytree.tree_leaves(nested, is_leaf=lambda each: type(each) not in _CONTAINERS)
    return [each for each in leaves if _is_cache(each)]


def _is_cache(leaf: object) -> bool:
    is_of_transformers = type(leaf).__module__.startswith("transformers.")
    return is_of_transformers and hasattr(leaf, "get_seq_length")


def _is_empty_cache(leaf: Any) -> bool:
    return _is_cache(leaf) and int(leaf.get_seq_length()) == 0
