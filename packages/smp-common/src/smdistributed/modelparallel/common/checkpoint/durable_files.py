"""Files and folders that are whole and on disk before their name is seen.

Names change by a rename only, after the content has been flushed, and folders are flushed after
their entries changed; so neither a killed process nor a lost machine leaves half a file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

from smdistributed.modelparallel.common.errors import CheckpointError

Writer = Callable[[BinaryIO], None]


class FileRecord(NamedTuple):
    """Size and checksum of a file when it was written."""

    size_bytes: int
    sha256: str

    def verify(self, stream: BufferedReader, path: Path) -> None:
        """Compare an open file with the record, and go back to its start.

        Raises:
            CheckpointError: the size or the content differs.
        """
        size_bytes = os.fstat(stream.fileno()).st_size
        problem = None
        if size_bytes != self.size_bytes:
            problem = f"expected {self.size_bytes} bytes, found {size_bytes}"
        elif hashlib.file_digest(stream, "sha256").hexdigest() != self.sha256:
            problem = "its content does not have the recorded checksum"
        if problem:
            raise CheckpointError(
                f"{path} is not the file that was saved: {problem}. Restore it, or resume from "
                "another tag."
            )
        stream.seek(0)


def write_file(path: str | os.PathLike[str], writer: Writer) -> None:
    """Write one file so that its name always has the whole old or the whole new content. Local.

    A killed write leaves a hidden temporary file, which the next write of the same file on the
    same host removes. A symbolic link is followed.

    Raises:
        CheckpointError: the parent folder is missing, or the path is no regular file.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise CheckpointError(f"The folder {target.parent} must exist before {target} is saved.")
    if target.exists() and not target.is_file():
        raise CheckpointError(f"{target} must be a regular file: save under another name.")
    prefix = f".{target.name}.{socket.gethostname()}-"
    for entry in os.listdir(target.parent):
        if entry.startswith(prefix) and entry.endswith(".tmp"):
            process = entry.removeprefix(prefix).partition("-")[0]
            if process.isdigit() and not _is_alive(int(process)):
                (target.parent / entry).unlink(missing_ok=True)
    # Unique, as several processes may write the same file: the last one wins, whole.
    temporary = target.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        write_and_flush(temporary, writer)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_directory(target.parent)


def write_and_flush(path: Path, writer: Writer) -> FileRecord:
    """Write a new file and flush it; its folder is not flushed."""
    try:
        return _write_and_flush(path, writer)
    except Exception as error:
        # A writer may stumble over what the system has refused, and tell of that alone; and the
        # system does not say for which file.
        cause = _refusal(error)
        if cause is None or cause.filename is not None:
            raise
        raise type(cause)(cause.errno, cause.strerror, str(path)) from error


def _write_and_flush(path: Path, writer: Writer) -> FileRecord:
    with open(path, "x+b") as stream:
        writer(stream)
        stream.flush()
        # Read again, as a writer may seek back and change what it wrote.
        return _flushed(stream)


def flush_written(path: Path) -> FileRecord:
    """Flush a file that other code has written, and say what it is; its folder is not flushed."""
    with open(path, "r+b") as stream:
        return _flushed(stream)


def _flushed(stream: BinaryIO) -> FileRecord:
    os.fsync(stream.fileno())
    stream.seek(0)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    return FileRecord(os.fstat(stream.fileno()).st_size, digest)


def rename(source: Path, target: Path) -> None:
    """Rename within a filesystem, replacing a file or an empty folder, and flush the result."""
    os.replace(source, target)
    flush_directory(target.parent)


def flush_directory(path: Path) -> None:
    """Flush the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems refuse this for folders, and write their entries at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a folder and its missing parents, flushed."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        flush_directory(path.parent)


def _refusal(error: BaseException) -> OSError | None:
    """The error of the system that was raised, or in whose wake another was: a full disk, say."""
    seen: set[int] = set()
    context: BaseException | None = error
    while context is not None and id(context) not in seen:
        if isinstance(context, OSError):
            return context
        seen.add(id(context))
        context = context.__cause__ or context.__context__
    return None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
