"""Masks that models of Transformers make, for sequences of which a rank has a piece."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

#: What functions that make masks are told of lengths.
_LENGTHS = ("q_length", "kv_length")


@contextlib.contextmanager
def masks_of_whole_sequences(piece: int, whole: int) -> Iterator[None]:
    """Inside, functions that make masks are told the length of the whole for that of a piece.

    A model passes on the length of what it has. They are in a registry, by names of attention.

    Args:
        piece: the length of what a rank has.
        whole: the length of the sequence.
    """
    masking = sys.modules.get("transformers.masking_utils")
    registry: Any = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if registry is None:
        yield
        return
    own = {name: registry[name] for name in registry}

    def of_whole(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            for name in _LENGTHS:
                if kwargs.get(name) == piece:
                    kwargs[name] = whole
            return function(*args, **kwargs)

        return make

    for name, function in own.items():
        registry[name] = of_whole(function)
    try:
        yield
    finally:
        for name, function in own.items():
            registry[name] = function
