"""Imports while the garbage collector rests.

PyTorch and what it needs are more than two thousand modules. What they make stays as long as the
process, so there is nothing to find in it; but the collector counts new objects, and looks through
all that there are each time they have become a quarter more.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keeps the collector from what is imported inside; afterwards it is as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
