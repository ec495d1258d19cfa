"""The random generators of Python and NumPy: whether something drew from them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any


def python_draws() -> Callable[[], bool]:
    """Returns a function that says whether Python's or NumPy's generator was drawn from since."""
    before = [(state(), state) for state, _ in _generators()]
    return lambda: not all(_same(former, state()) for former, state in before)


@contextlib.contextmanager
def python_random_kept() -> Iterator[None]:
    """Puts the generators back at the end."""
    before = [(state(), put_back) for state, put_back in _generators()]
    try:
        yield
    finally:
        for state, put_back in before:
            put_back(state)


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate)
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((numpy.random.get_state, numpy.random.set_state))
    return found


def _same(before: Any, now: Any) -> bool:
    return all(
        bool(getattr(one == other, "all", lambda equal=one == other: equal)())
        for one, other in zip(before, now, strict=True)
    )
