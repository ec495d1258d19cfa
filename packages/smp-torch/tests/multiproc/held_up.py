"""Holds up what a thread of the library does until something else has happened."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def held_up(owner: Any, name: str) -> Iterator[None]:
    """Has a function of a module or class wait for the end of the block."""
    is_over, real = threading.Event(), getattr(owner, name)

    def held(*args: Any, **kwargs: Any) -> Any:
        assert is_over.wait(60)
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, held):
        try:
            yield
        finally:
            is_over.set()
