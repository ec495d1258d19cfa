"""Which lines of a script have called."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

_OWN_PACKAGE = __name__.partition(".torch.")[0]
#: Whose frames lie between a function of torch and the code that wants it.
_BETWEEN = frozenset(("torch", "contextlib", "functools", "copy"))
#: Let an optimizer of the script update as its own code does; what is done to parameters in the
#: name of this library is done while they are awake.
_UPDATING = (
    f"{_OWN_PACKAGE}.torch.optimizer.distributed",
    f"{_OWN_PACKAGE}.torch.optimizer.whole_update",
)


def calling_line() -> tuple[str, int]:
    """Returns file and number of the innermost line that is neither torch's nor this library's."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_of_a_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of(error: Exception) -> tuple[str, int] | None:
    """Returns file and number of the innermost such line that an error has come through."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_of_a_library(traceback.tb_frame.f_globals.get("__name__", "")):
            found = code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def script_lines() -> Iterator[tuple[str, int]]:
    """Yields the name of the file and the number of each such line, from the innermost one."""
    frame: Any = sys._getframe()
    while frame is not None:
        if not _is_of_a_library(frame.f_globals.get("__name__", "")):
            yield os.path.basename(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back


def is_called_by_library(mechanism: Collection[str], depth: int = 1) -> bool:
    """Whether code of this library has called, by way of torch or not.

    Args:
        mechanism: the modules that bring a call to where it is asked.
        depth: of the first frame that counts, above the caller's.
    """
    frame: Any = sys._getframe(1 + depth)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        is_between = module.partition(".")[0] in _BETWEEN or module in _UPDATING
        if module not in mechanism and not is_between:
            return module.startswith(_OWN_PACKAGE)
        frame = frame.f_back
    return False


def _is_of_a_library(name: str) -> bool:
    return name.partition(".")[0] == "torch" or name.startswith(f"{_OWN_PACKAGE}.torch.")
