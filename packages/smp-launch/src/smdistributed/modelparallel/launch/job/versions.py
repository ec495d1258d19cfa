"""What the files of a folder were at a time: whole versions of them, in the order of their writing.

A script may write a checkpoint each second, replace a file by the next one, and delete what is old.
So each version gets a second name beside the folder as soon as it is seen, under which it stays
until it is taken. One is taken when nobody writes it any more, after all that were written before:
what says that a checkpoint is complete comes after the files that it is about.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

#: A file that is still for so long is whole, where the kernel does not know who writes it.
STILL_SECONDS = 2.0


class State(NamedTuple):
    """What tells two versions apart."""

    inode: int
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Version:
    """A file as it is, or was before it was replaced or deleted.

    Attributes:
        path: its name in the folder.
        source: where its bytes are.
        state: when it was last looked at.
        is_settled: whether it had not changed since the time before.
    """

    path: Path
    source: Path
    state: State
    is_settled: bool = False


class Versions:
    """Versions of the files of one folder that nobody has taken yet.

    One thread may look while another one takes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._second_names = folder.parent / f".{folder.name}-versions"
        self._taken: dict[Path, State] = {}
        #: By their inodes: a second name keeps a file from giving it to another.
        self._waiting: dict[int, Version] = {}
        self._lock = threading.Lock()
        self.close()

    def look(self) -> None:
        """Sees what is new in the folder."""
        with self._lock:
            for inode, version in self._waiting.items():
                with contextlib.suppress(FileNotFoundError):
                    state = _state(version.source)
                    settled = state == version.state
                    self._waiting[inode] = replace(version, state=state, is_settled=settled)
            for path in self._folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # the script tidies up
                    if path.is_file():
                        self._see(path)

    def waiting(self, *, only_whole: bool) -> Iterator[Version]:
        """Yields what has not been taken, in the order of its writing.

        Args:
            only_whole: whether to end before the first one that may still be written.
        """
        with self._lock:
            found = sorted(self._waiting.values(), key=lambda version: version.state.changed_ns)
        for version in found:
            if _has_left(version):
                self._forget(version)
            elif only_whole and not (version.is_settled and _is_whole(version.source)):
                return
            else:
                yield version

    def take(self, version: Version) -> None:
        """Notes that a version was taken as it was yielded: what has changed since is a new one."""
        self._taken[version.path] = version.state
        self._forget(version)

    def skip(self, path: Path) -> None:
        """Notes that a file needs not be taken as it is."""
        self._taken[path] = _state(path)

    def close(self) -> None:
        """Gives the second names back."""
        shutil.rmtree(self._second_names, ignore_errors=True)

    def _see(self, path: Path) -> None:
        state = _state(path)
        if self._taken.get(path) == state:
            return
        known = self._waiting.get(state.inode)
        if known is None:
            self._waiting[state.inode] = Version(path, self._named_again(path, state), state)
        else:
            # A file that was written under another name has its own one now.
            self._waiting[state.inode] = replace(known, path=path)

    def _named_again(self, path: Path, state: State) -> Path:
        """Gives a file a second name; where that cannot be done, its own must do."""
        name = self._second_names / str(state.inode)
        if not path.is_symlink():
            with contextlib.suppress(OSError):
                self._second_names.mkdir(exist_ok=True)
                os.link(path, name)
                return name
        return path

    def _forget(self, version: Version) -> None:
        with self._lock:
            self._waiting.pop(version.state.inode, None)
            if version.source != version.path:
                version.source.unlink(missing_ok=True)


def _has_left(version: Version) -> bool:
    """Whether a file has another name now, beyond the folder; one that was deleted has none."""
    if version.source == version.path:
        return not version.path.exists()
    is_here = version.path.exists() and version.path.samefile(version.source)
    return not is_here and version.source.stat().st_nlink > 1


def _state(path: Path) -> State:
    about = path.stat()
    return State(about.st_ino, about.st_size, about.st_mtime_ns)


def _is_whole(path: Path) -> bool:
    return time.time() - path.stat().st_mtime >= STILL_SECONDS or not _may_be_written(path)


def _may_be_written(path: Path) -> bool:
    """Whether a process has a file open to write it, as far as the kernel says.

    It grants a lease to read where nobody does. A writer that comes in that moment waits until it
    is given back; the signal for that is one that does nothing.
    """
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return True
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
