"""Errors about what cannot be computed from a piece of a sequence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.calling_line import calling_line, line_of

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


def check_numbers(own: Sequence[int], whole: Sequence[int], num_tokens: int, size: int) -> None:
    """Raises if Python counts tokens of a piece, and gives that to the script.

    Args:
        own: whole numbers that a body has given.
        whole: those that it gave for the whole.
        num_tokens: of a piece.
        size: how many ranks share the sequence.

    Raises:
        UnsupportedError: so it is.
    """
    for number, of_whole in zip(own, whole, strict=False):
        if number and number % num_tokens == 0 and of_whole == size * number:
            raise UnsupportedError(
                "context_parallel_degree splits the sequence over ranks, and the step function "
                f"returns {number}, a size of a piece of the sequence; for the whole it is "
                f"{of_whole}. Take it from an argument of the step function, which has the whole "
                "sequence (labels.numel())."
            )


def failing_for_pieces(error: Exception, num_tokens: int, length: int) -> UnsupportedError:
    """Returns the error for code that fails for a piece, and has not failed for the whole."""
    line = line_of(error)
    place = "" if line is None else f" ({os.path.basename(line[0])}:{line[1]})"
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return UnsupportedError(
        "context_parallel_degree splits the sequence over ranks, and code that ran for whole "
        f"sequences fails{place} where a rank has {num_tokens} of {length} tokens of what "
        f"parameters have met: {type(error).__name__}: {first}. Arguments of the step function "
        "are whole there: let code not compare sizes of one with those of the other, or set "
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
