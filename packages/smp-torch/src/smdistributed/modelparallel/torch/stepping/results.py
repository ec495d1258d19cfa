"""From the results of microbatches to the result of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from smdistributed.modelparallel.torch.stepping.output import StepOutput
from smdistributed.modelparallel.torch.tensors.nested import take_apart


def combine(
    results: Sequence[Any], weights: Sequence[float], *, detach: bool, place: str = "the result"
) -> Any:
    """Joins what the body returned for each microbatch.

    Tensors become a StepOutput, in their places in lists, tuples, mappings and dataclasses. Numbers
    become a list with one entry a microbatch. Any other object is returned as it is if all
    microbatches agree; else that of microbatch 0, with a warning.

    Args:
        results: one a microbatch.
        weights: share of the batch in each microbatch.
        detach: detach tensors.
        place: where this stands, for the warning.
    """
    first = results[0]
    if isinstance(first, torch.Tensor):
        return StepOutput([each.detach() if detach else each for each in results], weights)
    if isinstance(first, int | float | complex | np.number) and not isinstance(first, bool):
        return list(results)
    below: Callable[[Any, list[Any]], Any] = lambda key, items: combine(  # noqa: E731
        items, weights, detach=detach, place=f"{place}[{key!r}]"
    )
    if type(first) in (list, tuple) and all(len(each) == len(first) for each in results):
        items = [below(i, [each[i] for each in results]) for i in range(len(first))]
        return items if type(first) is list else tuple(items)
    if type(first) is dict and all(each.keys() == first.keys() for each in results):
        return {key: below(key, [each[key] for each in results]) for key in first}
    parts = take_apart(first)
    if parts is not None:
        others = [take_apart(each) for each in results]
        if all(each is not None and each.items.keys() == parts.items.keys() for each in others):
            return parts.build(
                {
                    key: below(key, [each.items[key] for each in others if each is not None])
                    for key in parts.items
                }
            )
    if any(each is not first and each != first for each in results[1:]):
        warnings.warn(
            f"{place} of the step function differs between microbatches and is no tensor or "
            "number; the value of microbatch 0 is returned.",
            stacklevel=2,
        )
    return first
