"""The input of a job, which its first rank reads.

mpirun hands on what comes, and never its end: a rank that reads to the end of a pipe or a file
would wait for ever. So where the first rank is on this host it opens the input itself. It cannot
open a terminal, from which only processes of the foreground read; there mpirun hands on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smdistributed.modelparallel.common.launcher.hosts import LOCAL_HOST

#: What the first rank opens, and of which processes it is.
VARIABLE = "SMP_INPUT"


def offered(hosts: Sequence[str], command: Sequence[str]) -> dict[str, str]:
    """Returns the variable by which the first rank finds this process's input; empty for mpirun's.

    Args:
        hosts: of each rank.
        command: mpirun's command line, which may say who reads.
    """
    own = f"/proc/{os.getpid()}/fd/0"
    if hosts[0] != LOCAL_HOST or "--stdin" in command:
        return {}
    with contextlib.suppress(OSError), _opened(own) as descriptor:
        if not os.isatty(descriptor):
            return {VARIABLE: f"{_processes()} {own}"}
    return {}  # closed, or a connection, which nobody can open again


def take(environ: Mapping[str, str]) -> None:
    """Reads from there from now on, if this process is among those of the one that offered it."""
    seen_by, _, path = environ.get(VARIABLE, "").rpartition(" ")
    if not path or seen_by != _processes():
        return
    with _opened(path) as descriptor:
        os.dup2(descriptor, 0)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Opens an input of another process where that one is in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        place = Path(path.replace("/fd/", "/fdinfo/")).read_text(encoding="utf-8").split()[1]
        with contextlib.suppress(OSError):  # a pipe has no place
            os.lseek(descriptor, int(place), os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _processes() -> str:
    """Returns what tells the processes that this one sees from all others, on any host."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{started} {os.readlink('/proc/self/ns/pid')}"
