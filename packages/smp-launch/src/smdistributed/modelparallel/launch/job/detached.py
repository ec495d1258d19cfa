"""Processes that outlive who starts them, and hold the lock of their folder while they live.

A lock, not a process id, says that such a process lives: ids come again.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path


def take_lock(path: Path) -> int | None:
    """Takes a lock; returns its descriptor, or None if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def start(
    module: str, folder: Path, descriptor: int, log: Path, python: str = sys.executable
) -> None:
    """Starts ``python -m MODULE FOLDER DESCRIPTOR`` in a session of its own.

    The lock is taken here and handed on, so there is no moment in which nobody holds it.
    """
    try:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [python, "-m", module, str(folder), str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                pass_fds=(descriptor,),
            )
    finally:
        os.close(descriptor)
    # Somebody has to take its exit code when it ends, else it stays as a zombie.
    threading.Thread(target=process.wait, name=f"wait-{folder.name}", daemon=True).start()
