"""Checks that ``torch.distributions`` makes of its arguments, beyond PyTorch's public API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution


@contextlib.contextmanager
def arguments_unchecked() -> Iterator[None]:
    """Inside, new distributions do not look at what they are given, as with ``python -O``.

    They compare shapes of parameters and values, and ask whether all numbers are in bounds.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
