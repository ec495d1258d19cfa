"""Every process of a job on this host: found through /proc, and killed at the end.

mpirun gives each rank a process group of its own, and a rank may start processes that detach
themselves. As the reaper of its descendants this process stays the ancestor of them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Set
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


def become_reaper() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Has this process receive SIGTERM when its parent ends; for use between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """Returns the ids of the processes below ``root``, zombies not counted."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # "id (name) state parent ...", and the name may hold anything.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(entry.name))
        if state not in "ZX":
            alive.add(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found & alive


def kill_descendants(spared: Set[int], timeout_seconds: float = 3.0) -> None:
    """Kills every process below this one and waits until none is left.

    Args:
        spared: ids of processes that are not part of the job, with what is below them.
        timeout_seconds: how long to wait; a process in the kernel's hands may outlast it.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        kept = set(spared).union(*(descendants(pid) for pid in spared))
        remaining = descendants(os.getpid()) - kept
        if not remaining:
            return
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        for pid in remaining:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
