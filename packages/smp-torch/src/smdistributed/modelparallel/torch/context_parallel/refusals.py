"""Errors about what cannot be computed from a piece of a sequence."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.calling_line import calling_line, line_of
from smdistributed.modelparallel.torch.context_parallel.calls import Length

_WITHOUT_PROOF = (
    "does not give for a piece of the sequence what it gives for the whole (a convolution, a "
    "recurrent layer, a cumulative sum, a norm or a softmax along the sequence, attention that is "
    "written by hand, tokens that a mask chooses, random numbers for each token)"
)
_REMEDY = (
    "Let attention be torch.nn.functional.scaled_dot_product_attention (of Transformers: "
    'attn_implementation="sdpa", and use_cache=False), choose losses of tokens '
    '(reduction="none", or labels of -100) rather than their logits, or set '
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


def check_numbers(own: Sequence[int], whole: Sequence[int], lengths: Sequence[Length]) -> None:
    """Raises if Python counts tokens of a piece, and gives that to the script.

    Args:
        own: whole numbers that a body has given.
        whole: those that it gave for the whole.
        lengths: of sequences that it computed with.

    Raises:
        UnsupportedError: so it is.
    """
    for number, of_whole in zip(own, whole, strict=False):
        if number != of_whole and any(
            of_whole % length.whole == 0 and of_whole // length.whole * piece == number
            for length in lengths
            for piece in length.pieces
        ):
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


def refused_call(
    function: Any,
    why: str | None,
    tensors: Sequence[torch.Tensor] = (),
    wholes: Sequence[torch.Size] = (),
) -> UnsupportedError:
    """Returns the error for a call in progress; see ``refused``.

    Args:
        function: that was called, or the name of what was done.
        why: what is wrong with it; None if no proof was found.
        tensors: that it got.
        wholes: shapes of the wholes of these.
    """
    pieces = [
        f"{tuple(tensor.shape)} of {tuple(whole)}"
        for tensor, whole in itertools.islice(zip(tensors, wholes, strict=True), 4)
    ]
    return refused(function if isinstance(function, str) else name_of(function), why, pieces)


def has_backward_code(function: Any) -> bool:
    """Whether a function is one of autograd, whose backward pass is code of somebody's."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def name_of(function: Any) -> str:
    """Returns what messages call a function."""
    if has_backward_code(function):
        return f"{function.__self__.__name__}.apply"
    try:
        name = resolve_name(function)
    except RuntimeError:  # of functions that PyTorch knows no overrides of
        name = None
    return name or str(getattr(function, "__name__", function))


def _module_in_progress() -> str | None:
    """Returns the class of the innermost module whose code has called."""
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return None
