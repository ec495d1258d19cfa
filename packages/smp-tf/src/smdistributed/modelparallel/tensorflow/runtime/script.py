"""The line of the script that is being executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

#: What lies between a line of a script and an operation.
_LIBRARIES = ("/tensorflow/", "/keras/", "/tf_keras/", "/smdistributed/", "contextlib")


def frame_of_script() -> Any:
    """Returns the frame of the script's line that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_of_libraries(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of_script() -> str:
    """Returns the script's line that is being executed, in words."""
    frame = frame_of_script()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_of_libraries(path: str) -> bool:
    return any(each in path for each in _LIBRARIES)
