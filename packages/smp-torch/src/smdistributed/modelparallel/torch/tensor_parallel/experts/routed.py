"""What stacked experts are called with: tokens, which experts each goes to, and their weights.

Shape: tokens are (..., width), of which there are T in all; index and weights are (T, choices), or
(T,) where each token has one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import pytree


@dataclass(frozen=True)
class Routed:
    """A call of stacked experts, taken apart.

    Attributes:
        tokens: (..., width), floating-point numbers.
        index: (T, choices) or (T,), whole numbers: an expert for each choice.
        weights: of these choices, floating-point numbers.
    """

    tokens: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    _leaves: tuple[Any, ...]
    _places: tuple[int, int, int]
    _spec: Any

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self.tokens.shape[:-1].numel()

    def with_tensors(
        self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Any, Any]:
        """Returns the arguments of a call with others, by position and by keyword."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, (tokens, index, weights), strict=True):
            leaves[place] = tensor
        made: tuple[Any, Any] = pytree.tree_unflatten(leaves, self._spec)
        return made

    def choices(self, index: torch.Tensor) -> torch.Tensor:
        """Returns what belongs to one choice a token, (P,), in the dims that this call has."""
        return index[:, None] if self.index.dim() > 1 else index


def routed(args: Sequence[Any], kwargs: dict[str, Any]) -> Routed | None:
    """Takes a call apart; returns None if it is none of stacked experts.

    The whole numbers are the index, and what has its shape are the weights; of two that have it the
    second.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
    whole = [each for each in places if not leaves[each].is_floating_point()]
    rest = [each for each in places if leaves[each].is_floating_point()]
    if len(whole) != 1 or len(rest) != 2:
        return None
    if leaves[rest[1]].shape != leaves[whole[0]].shape:
        rest.reverse()
    index, tokens, weights = (leaves[each] for each in (whole[0], *rest))
    is_list = index.dim() in (1, 2) and index.dtype in (torch.int64, torch.int32)
    if not is_list or weights.shape != index.shape or tokens.dim() < 2:
        return None
    if tokens.shape[:-1].numel() != index.shape[0]:
        return None
    return Routed(tokens, index, weights, tuple(leaves), (rest[0], whole[0], rest[1]), spec)
