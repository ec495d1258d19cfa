"""Functions of many tensors, such as ``torch._foreach_mul_``, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_foreach(func: Any) -> bool:
    """Whether a function of torch does the same with each tensor of lists."""
    return getattr(func, "__name__", "").startswith("_foreach_")


def one_by_one(call: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
    """Calls a function of lists with one place of them after the other; returns what it gives.

    Args:
        call: gets arguments, positional and by keyword, whose lists have one element.
        args: of all places.
        kwargs: likewise.
    """
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    results = []
    for place in range(len(lists[0])):

        def chosen(value: Any, place: int = place) -> Any:
            is_of_each = isinstance(value, list | tuple) or (
                isinstance(value, torch.Tensor) and value.dim() == 1
            )
            return value[place : place + 1] if is_of_each else value

        some = [chosen(each) for each in args]
        named = {key: chosen(each) for key, each in kwargs.items()}
        results.append(call(some, named))
    first = results[0] if results else None
    return None if first is None else type(first)(each for one in results for each in one)
