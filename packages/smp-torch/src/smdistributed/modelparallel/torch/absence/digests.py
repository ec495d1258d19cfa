"""By what ranks know that they mean the same value: how it came about, and where it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.calling_line import script_lines
from smdistributed.modelparallel.torch.compat.private.modes import pytree

#: What is written the same way on every rank.
_WRITTEN = (bool, int, float, complex, str, bytes, type(None), slice, type(...), torch.dtype)


def digest_of(func: Any, args: Any, kwargs: Any, known: Callable[[Any], str | None]) -> str:
    """Returns what stands for a call on every rank that makes it.

    Args:
        func: what is called.
        args: positional arguments.
        kwargs: those by keyword.
        known: tells the digest of a tensor that not every rank has.
    """
    words = [str(getattr(func, "__name__", func))]
    for each in pytree.tree_leaves((args, kwargs)):
        if isinstance(each, torch.Tensor):
            words.append(known(each) or "tensor")
        else:
            words.append(repr(each) if isinstance(each, _WRITTEN) else type(each).__name__)
    return hash_of(*words)


def hash_of(*words: str) -> str:
    """Returns a short word for some."""
    return hashlib.blake2b("\n".join(words).encode(), digest_size=12).hexdigest()


def place_of(digest: str) -> str:
    """Returns the name of a value that the script reads here."""
    return hash_of(digest, *(f"{file}:{line}" for file, line in script_lines()))
