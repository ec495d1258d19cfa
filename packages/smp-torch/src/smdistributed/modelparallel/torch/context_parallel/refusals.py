"""Errors about what cannot be computed from a piece of a sequence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.calling_line import calling_line

_WITHOUT_PROOF = (
    "does not give for a piece of the sequence what it gives for the whole (a convolution, a "
    "recurrent layer, a cumulative sum, a norm or a softmax along the sequence, attention that is "
    "written by hand, random numbers for each token)"
)
_REMEDY = (
    "Let attention be torch.nn.functional.scaled_dot_product_attention (of Transformers: "
    'attn_implementation="sdpa", and use_cache=False), shift labels rather than logits, or set '
    "context_parallel_degree to 1."
)


def check_used(*, has_pieces: bool) -> None:
    """Raises if every rank would compute the whole.

    Args:
        has_pieces: a rank has a piece of something.

    Raises:
        UnsupportedError: it has not.
    """
    if not has_pieces:
        raise UnsupportedError(
            "context_parallel_degree splits sequences, and this step computes nothing of which "
            "a rank could have a piece: every rank would compute the whole. Name the "
            "arguments with a sequence in smp.step(sequence_dims=...), or set "
            "context_parallel_degree to 1."
        )


def refused(name: str, why: str | None, pieces: Sequence[str] = ()) -> UnsupportedError:
    """Returns the error for a call in progress.

    Args:
        name: of the function.
        why: what is wrong with it; None if no proof was found.
        pieces: the shapes of what it got.
    """
    file, line = calling_line()
    module = _module_in_progress()
    where = f"{os.path.basename(file)}:{line}"
    if module is not None:
        where = f"{where}, in a {module}"
    received = f" It got {', '.join(pieces)}." if pieces else ""
    return UnsupportedError(
        f"context_parallel_degree splits the sequence over ranks, and {name} ({where}) "
        f"{why or _WITHOUT_PROOF}.{received} {_REMEDY}"
    )


def _module_in_progress() -> str | None:
    """Returns the class of the innermost module whose code has called."""
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return None
