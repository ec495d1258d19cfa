"""Dropout of pieces: each rank draws for the whole sequence, and takes its piece of the mask."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, cut

DROPOUT = torch.nn.functional.dropout
_SIGNATURE = inspect.signature(DROPOUT)


def is_dropout(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws a mask, and leaves what it is given as it is."""
    if function is not DROPOUT:
        return False
    given = _given(args, kwargs)
    return bool(given["p"] > 0 and given["training"] and not given["inplace"])


def dropout(
    group: ContextGroup,
    whole: torch.Size,
    layout: Layout,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Does for a piece what one process does for the whole; all ranks draw the same numbers.

    Args:
        group: the ranks that share the sequence.
        whole: shape of the whole.
        layout: how it is cut.
        args: of the call.
        kwargs: likewise.
    """
    given = _given(args, kwargs)
    piece: torch.Tensor = given["input"]
    mask = DROPOUT(piece.new_ones(whole), given["p"], training=True)
    return piece * cut(mask, layout, group.rank, group.size)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
