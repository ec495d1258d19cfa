"""Which line of a script has called."""

from __future__ import annotations

import sys


def calling_line() -> tuple[str, int]:
    """Returns file and number of the innermost line that is neither torch's nor this library's."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_of_a_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_of_a_library(name: str) -> bool:
    return name.partition(".")[0] == "torch" or name.startswith(
        "smdistributed.modelparallel.torch."
    )
