"""Losses that are means over tokens, of which a label may leave some out.

How many tokens count differs from piece to piece, so a mean of the pieces' means would be wrong:
their sums are added up, and divided by the number of all that count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup

_SIGNATURES: dict[Any, inspect.Signature] = {
    function: inspect.signature(function)
    for function in (functional.cross_entropy, functional.nll_loss)
}


def is_mean_over_tokens(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a mean over the tokens whose label is not left out."""
    signature = _SIGNATURES.get(function)
    if signature is None:
        return False
    given = _bound(signature, args, kwargs)
    is_mean = given["reduction"] == "mean" and given["size_average"] is given["reduce"] is None
    return is_mean and not given["target"].is_floating_point()


def with_sum(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of the same call that gives a sum."""
    given = _bound(_SIGNATURES[function], args, kwargs)
    given["reduction"] = "sum"
    names = [name for name in given if name not in ("size_average", "reduce")]
    return tuple(given[name] for name in names[:2]), {name: given[name] for name in names[2:]}


def mean_over_tokens(
    function: Callable[..., torch.Tensor],
    group: ContextGroup,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Returns the mean over the tokens of all ranks. Collective: CP_GROUP.

    Args:
        function: the loss.
        group: the ranks.
        args: of the call ``with_sum``, for the own piece.
        kwargs: likewise.
    """
    target, weight = args[1], kwargs["weight"]
    counts = target != kwargs["ignore_index"]
    if weight is None:
        count = counts.sum().to(args[0].dtype)
    else:
        count = weight[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()
    return group.total(function(*args, **kwargs)) / group.collectives.sum(count)


def _bound(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
