"""The stderr that a process was started with, on which it tells its launcher how it fares.

A script may put another one in its place, as a file of its own; ``smprun`` reads the first, and in
it lines that are meant for it alone: where a rank is, that it ends, why it failed.
"""

from __future__ import annotations

import contextlib
import os

#: The descriptor of a duplicate, and what file it is of; empty where nobody has kept one.
_kept: dict[int, tuple[int, int]] = {}


def keep() -> None:
    """Keeps the stderr that this process has now, but not for its children.

    mpirun waits until nobody has it, and a child that goes on closes what it knows of.
    """
    if not _kept:
        duplicate = os.dup(2)
        _kept[duplicate] = _file_of(duplicate)
        os.register_at_fork(after_in_child=_let_go)


def descriptor() -> int:
    """Returns that of the stderr that was kept, or of the present one."""
    for duplicate, file in _kept.items():
        with contextlib.suppress(OSError):  # a script may close all descriptors
            if _file_of(duplicate) == file:
                return duplicate
    return 2


def write(text: str) -> None:
    """Writes to it in one go, as others write to the same; for any thread."""
    with contextlib.suppress(OSError):
        os.write(descriptor(), text.encode(errors="replace"))


def is_replaced() -> bool:
    """Whether the process writes its errors elsewhere now."""
    try:
        return _file_of(2) != _file_of(descriptor())
    except OSError:
        return False  # it has none


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _let_go() -> None:
    for duplicate in _kept:
        with contextlib.suppress(OSError):
            os.close(duplicate)
    _kept.clear()
