from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from smdistributed.modelparallel.common.checkpoint.durable_files import make_directory, write_file
from smdistributed.modelparallel.common.errors import CheckpointError


def write_new(stream: BinaryIO) -> None:
    stream.write(b"new")


def write_half(stream: BinaryIO) -> None:
    stream.write(b"ha")
    raise OSError(28, "No space left on device")


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("old and longer")
    write_file(str(path), write_new)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_file(path, write_half)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_the_content_is_on_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        is_folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir()
        size = os.fstat(descriptor).st_size
        events.append("flush folder" if is_folder else f"flush {size} bytes")
        fsync(descriptor)

    def record_replace(source: Any, target: Any) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_file(tmp_path / "a", write_new)
    assert events == ["flush 3 bytes", "rename", "flush folder"]


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}/missing must exist"):
        write_file(tmp_path / "missing" / "a", write_new)


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="must be a regular file"):
            write_file(path, write_new)


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", write_new)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    gone = f".a.{host}-{dead.pid}-00000000.tmp"
    kept = {
        f".a.{host}-{os.getpid()}-00000000.tmp",
        f".a.{host}-other-00000000.tmp",
        f".a.elsewhere-{dead.pid}-00000000.tmp",
        f".b.{host}-{dead.pid}-00000000.tmp",
    }
    for name in {gone, *kept}:
        (tmp_path / name).touch()
    write_file(tmp_path / "a", write_new)
    assert set(os.listdir(tmp_path)) == {"a", *kept}


def test_every_new_folder_is_flushed_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert flushed == [str(tmp_path), str(tmp_path / "a")]


def test_what_the_system_refuses_is_told_through_the_writers_own_troubles(tmp_path: Path) -> None:
    def write(stream: BinaryIO) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch's writer does

    with pytest.raises(OSError, match=r"No space left on device: '.*\.a\..*tmp'"):
        write_file(tmp_path / "a", write)
    assert not list(tmp_path.iterdir())

    def stumble(stream: BinaryIO) -> None:
        raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        write_file(tmp_path / "a", stumble)
