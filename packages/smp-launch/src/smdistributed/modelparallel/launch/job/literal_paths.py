"""Scripts that have ``/opt/ml`` in their own text: the job's folder stands there, for them alone.

In a mount namespace of its own the processes of a job see their folder at ``/opt/ml``; two jobs at
once see each their own. That takes root. Elsewhere variables and arguments name the real paths, and
a line of the log says what does not work.

Source: estimator interface, section 4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_PLACE = "/opt/ml"
_SUFFIXES = (".py", ".sh", ".json", ".yaml", ".yml")
_MOST_BYTES = 1 << 20
_LIMIT_SECONDS = 10.0
#: The empty folder stays: it is where the job's folder is put, in the namespace of its processes.
_ENTER = f'mkdir -p {_PLACE} && mount --bind "$0" {_PLACE} && exec "$@"'


def are_in(code: Path) -> bool:
    """Tells whether the text of a script, or of what is shipped with it, names the place."""
    texts = (path for path in code.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return any(
        _PLACE in path.read_text(encoding="utf-8", errors="replace")
        for path in texts
        if path.stat().st_size <= _MOST_BYTES
    )


def can_be_shown() -> bool:
    """Tells whether this process may make namespaces."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    words = ("unshare", "--mount", "--propagation", "private", "true")
    try:
        done = subprocess.run(words, capture_output=True, timeout=_LIMIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def shown(folder: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a command line whose process, and all below it, see a folder at the place."""
    enter = ("unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _ENTER)
    return (*enter, str(folder), *words)
