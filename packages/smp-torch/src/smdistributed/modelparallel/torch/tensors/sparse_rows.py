"""Gradients that have some rows alone, as embeddings with ``sparse=True`` give them.

Ranks add them up as any others, and tell each other which rows there are: optimizers for such
gradients (``SparseAdam``) leave the other rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError

_Key = TypeVar("_Key", bound=Hashable)


def rows_of(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """Returns which rows a sparse gradient has: a 1 for each. Shape: (rows,), on the host.

    Args:
        gradient: of a parameter.
        name: of that.

    Raises:
        UnsupportedError: it is sparse in more than its rows.
    """
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UnsupportedError(
            f"{name} has a gradient of layout {gradient.layout}, and ranks add up dense ones and "
            "those that are sparse in their rows, as of embeddings: give its layer sparse=False."
        )
    rows = torch.zeros(len(gradient), dtype=torch.uint8, device="cpu")
    rows[gradient._indices()[0].to("cpu")] = 1
    return rows


def of_rows(dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns a sparse tensor of some rows.

    Args:
        dense: has the numbers of these.
        rows: a 1 for each. Shape: (rows,).
    """
    chosen = rows.nonzero().view(-1).to(dense.device)
    return torch.sparse_coo_tensor(
        chosen[None], dense[chosen], dense.shape, is_coalesced=True, check_invariants=False
    )


def rows_of_all(
    sizes: Mapping[_Key, int],
    own: Mapping[_Key, torch.Tensor],
    take_largest: Callable[[torch.Tensor], object],
) -> dict[_Key, torch.Tensor]:
    """Returns which rows there are on some rank. Collective, if there is any such gradient.

    Args:
        sizes: the numbers of rows of what has a sparse gradient on some rank, the same on all.
        own: the rows of those that have one on this rank.
        take_largest: takes the largest of each number over the ranks, in place.
    """
    if not sizes:
        return {}
    found: Sequence[torch.Tensor] = [
        own[key] if key in own else torch.zeros(size, dtype=torch.uint8, device="cpu")
        for key, size in sizes.items()
    ]
    together = torch.cat([*found])
    take_largest(together)
    return dict(zip(sizes, torch.split(together, list(sizes.values())), strict=True))
