"""Where the choices of tokens go: to the ranks that have the experts, a token once a rank.

With 4 experts over two ranks, a token whose choices are 0, 1 and 3 is one row for rank 0, with two
choices, and one row for rank 1, with one. Each rank sums what its experts make of a row, so that as
many rows come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.torch.tensor_parallel.experts.routed import Routed


@dataclass(frozen=True)
class Dispatch:
    """What goes where; rows and choices for rank 0 first, then those for rank 1, and so on.

    Attributes:
        tokens: (rows,) the token that each row is.
        rows: (choices,) the row of each choice, counted among those for the same rank.
        experts: (choices,) the expert of each, counted among those of the same rank.
        choices: (choices,) its place in the index, flattened.
        num_rows: for each rank.
        num_choices: for each rank.
        least, most: of the experts in the index.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    experts: torch.Tensor
    choices: torch.Tensor
    num_rows: Sequence[int]
    num_choices: Sequence[int]
    least: int
    most: int

    def of(self, rank: int) -> Dispatch:
        """Returns what goes to one rank."""
        tokens = torch.split(self.tokens, list(self.num_rows))[rank]
        rows, experts, choices = (
            torch.split(each, list(self.num_choices))[rank]
            for each in (self.rows, self.experts, self.choices)
        )
        here = [self.num_rows[rank]], [self.num_choices[rank]]
        return Dispatch(tokens, rows, experts, choices, *here, self.least, self.most)


def dispatched(index: torch.Tensor, number: int, size: int) -> Dispatch:
    """Returns where choices go.

    Args:
        index: (T, choices) or (T,), which experts tokens go to.
        number: of experts.
        size: how many ranks have equal shares of them.
    """
    flat = (index if index.dim() > 1 else index[:, None]).long()
    owner = (flat // (number // size)).clamp(0, size - 1)
    goes = flat.new_zeros((len(flat), size), dtype=torch.bool).scatter(1, owner, True).t()
    owners = owner.reshape(-1)
    order = owners.argsort(stable=True)
    owners = owners[order]
    num_rows = goes.sum(1)
    place = goes.reshape(-1).cumsum(0).view_as(goes) - 1 - (num_rows.cumsum(0) - num_rows)[:, None]
    num_choices = torch.bincount(owners, minlength=size)
    ends = torch.stack(flat.aminmax()) if flat.numel() else flat.new_zeros(2)
    *counts, least, most = torch.cat([num_rows, num_choices, ends]).tolist()
    return Dispatch(
        goes.nonzero()[:, 1],
        place[owners, order // max(flat.shape[1], 1)],
        flat.reshape(-1)[order] - owners * (number // size),
        order,
        counts[:size],
        counts[size:],
        least,
        most,
    )


def computed(
    call: Routed,
    rows: torch.Tensor,
    row_of: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    function: Callable[[Any], torch.Tensor],
) -> torch.Tensor:
    """Returns what experts make of rows, the sum over the choices of each.

    A rank whose experts get nothing computes a row of ones that counts for nothing, so that its
    parameters have gradients, of zeros, as those of an expert that gets nothing have.

    Args:
        call: of which form the calls of the experts are.
        rows: (rows, width).
        row_of: (choices,) the row of each.
        experts: (choices,) the expert of each.
        weights: (choices,) of each.
        function: calls the experts; is given the arguments.
    """
    count = len(rows)
    is_idle = not len(row_of)
    if is_idle:
        rows = torch.cat([rows, rows.new_ones((1, rows.shape[1]))])
        weights = torch.cat([weights, weights.new_zeros(1)])
        row_of, experts = row_of.new_zeros(1), experts.new_zeros(1)
    index = call.choices(experts.to(call.index.dtype))
    made = function(call.with_tensors(rows.index_select(0, row_of), index, call.choices(weights)))
    if is_idle:
        return made[:0]
    return made.new_zeros((count, made.shape[-1])).index_add(0, row_of, made)
