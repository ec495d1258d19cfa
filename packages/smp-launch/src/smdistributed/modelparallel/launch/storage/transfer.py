"""Copies between addresses and this machine; what is copied is whole before its name is seen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

from smdistributed.modelparallel.common.checkpoint.durable_files import write_file
from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.storage.places import Location, make_private


def write_whole(path: Path, text: str) -> None:
    """Replaces a file of this machine; readers see the old or the new one, whole."""
    data = text.encode()

    def write(file: BinaryIO) -> None:
        file.write(data)

    write_file(path, write)


def upload(source: Path, target: Location) -> None:
    """Copies a file of this machine to an address.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        if path := target.local:
            make_private(path.parent)
            with source.open("rb") as stream:
                write_file(path, lambda file: shutil.copyfileobj(stream, file, 1 << 20))
        else:
            target.files.put_file(str(source), target.path)
    except Exception as error:  # each store raises errors of its own
        raise StorageError(f"{source} cannot be copied to {target.address}: {error}.") from error


def download(source: Location, target: Path) -> None:
    """Copies a file behind an address to this machine.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        if path := source.local:
            shutil.copyfile(path, target)
            return
        partial = target.with_name(f".{target.name}.part")
        source.files.get_file(source.path, str(partial))
        partial.replace(target)
    except Exception as error:  # each store raises errors of its own
        raise StorageError(f"{source.address} cannot be copied to {target}: {error}.") from error


def download_all(source: Location, folder: Path) -> list[str]:
    """Copies the files whose names begin so to a folder of this machine; returns their names here.

    Raises:
        StorageError: one cannot be read.
    """
    found = []
    for key in sorted(source.files.find(source.path)):
        name = key.removeprefix(source.path).lstrip("/") or key.rpartition("/")[2]
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise StorageError(f"{key} would lie outside of {folder}: rename it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        download(Location(key, source.files, key), target)
        found.append(str(target))
    return found
