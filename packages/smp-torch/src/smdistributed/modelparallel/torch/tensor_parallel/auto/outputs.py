"""What slices of a result make it: a sum, a mean, parts side by side, or each the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan

#: An output that every rank has alike.
SAME = "same"
#: An output that is a sum over the ranks.
SUM = "sum"
#: An output that is the mean over the ranks.
MEAN = "mean"
#: An output that every rank has whole, as it has taken part in sums.
COMMON = "common"


class RefutedError(Exception):
    """Slices do not compute what the whole does; says why."""


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """Returns what a result may be that slices have in the shape of the whole."""
    if plan.sums:
        return (COMMON, MEAN) if plan.is_mean else (COMMON,)
    return (SAME, MEAN) if plan.is_mean else (SUM, SAME)


def kind_of(
    parts: list[torch.Tensor],
    whole: torch.Tensor,
    is_near: Callable[[torch.Tensor], bool],
    known: int | str | None,
    kinds: Sequence[str],
) -> int | str:
    """Returns what slices of a result make it; what is known is confirmed."""
    if all(part.shape == whole.shape for part in parts):
        for kind in kinds:
            if known not in (None, kind):
                continue
            if kind in (SAME, COMMON) and all(map(is_near, parts)):
                return kind
            if kind in (SUM, MEAN) and whole.is_floating_point():
                total = sum(parts[1:], parts[0])
                if is_near(total if kind == SUM else total / len(parts)):
                    return kind
        raise RefutedError("the sum of what its slices give differs from what it gives whole")
    dim = split_dim(tuple(whole.shape), [tuple(part.shape) for part in parts])
    assert dim is not None
    if known not in (None, dim) or not is_near(torch.cat(parts, dim)):
        raise RefutedError("what its slices give differs from what it gives whole")
    return dim


def split_dim(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> int | None:
    """Returns the dim along which equal parts make a whole; None if each is one.

    Raises:
        RefutedError: neither.
    """
    if all(part == whole for part in parts):
        return None
    for dim in range(len(whole)):
        sizes = list(whole)
        sizes[dim] //= len(parts)
        if all(part == tuple(sizes) for part in parts) and sizes[dim] * len(parts) == whole[dim]:
            return dim
    raise RefutedError(f"its slices have shapes {parts}, which do not make {whole}")


def weights_of(
    rank: int, size: int, outputs: Sequence[int | str], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns what gradients come to the slices of one rank."""
    found = []
    for kind, weight in zip(outputs, weights, strict=True):
        if kind == SUM:
            found.append(weight)
        elif kind in (MEAN, COMMON):
            found.append(weight / size)
        elif kind == SAME:  # one rank uses its own
            found.append(weight if rank == 0 else torch.zeros_like(weight))
        else:
            found.append(weight.chunk(size, int(kind))[rank])
    return found
