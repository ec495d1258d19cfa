"""What a script of a container finds in the files of its machine: for it alone.

In a mount namespace of its own the processes of a job see their folder at ``/opt/ml``, where the
text of a script names it, and ``/etc/hosts`` knows the names of its hosts, which are parts of this
machine; two jobs at once see each their own. That takes root. Elsewhere variables and arguments
name the real paths, and a line of the log says what does not work.

Source: estimator interface, section 4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PLACE = "/opt/ml"
_NAMES = Path("/etc/hosts")
_HERE = "127.0.0.1"
_SUFFIXES = (".py", ".sh", ".json", ".yaml", ".yml")
_MOST_BYTES = 1 << 20
_LIMIT_SECONDS = 10.0
#: The empty folder stays: it is where the job's folder is put, in the namespace of its processes.
_SHOW_FOLDER = f'mkdir -p {PLACE} && mount --bind "$0" {PLACE}'
_SHOW_NAMES = f'mount --bind "$0/input/config/hosts" {_NAMES}'


def are_in(code: Path) -> bool:
    """Tells whether the text of a script, or of what is shipped with it, names the place."""
    texts = (path for path in code.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return any(
        PLACE in path.read_text(encoding="utf-8", errors="replace")
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


def shown(
    folder: Path, words: tuple[str, ...], *, has_place: bool, names: Sequence[str]
) -> tuple[str, ...]:
    """Returns a command line whose process, and all below it, see what their script expects.

    Args:
        folder: of the job.
        words: the command line.
        has_place: whether the folder is at the place.
        names: of hosts that are parts of this machine.
    """
    steps = [_SHOW_FOLDER] if has_place else []
    if names:
        known = _NAMES.read_text(encoding="utf-8") if _NAMES.exists() else ""
        own = f"{known.rstrip()}\n{_HERE} {' '.join(names)}\n"
        (folder / "input/config/hosts").write_text(own, encoding="utf-8")
        steps.append(_SHOW_NAMES)
    script = " && ".join((*steps, 'exec "$@"'))
    enter = ("unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", script)
    return (*enter, str(folder), *words)
