"""Checkpoints in a directory, as one process sees and changes them; no tensor I/O.

A directory holds partial checkpoints (a folder of files, from many ranks), full checkpoints (a
model file and a user content file, from one rank; or a folder, from many), and the name of the
newest of both::

    newest                            one line: '<tag> partial' or '<tag> full'
    <tag>_partial/                    the files and manifest.json (size and SHA-256 of each)
    <tag>, optimizer_<tag>,           a full checkpoint; its manifest is .manifest_<tag>.json
        user_content_<tag>
    <tag>/                            a full checkpoint that is a folder, as a partial one is

A checkpoint passes through three states; a save that finds the remains of a killed one removes
them, or completes the installation:

    .staging-<entry>-<token>/         being written; never read
    .committed-<entry>/               complete and on disk, and read instead of <entry>, which may
                                      still be the one that it replaces: the rename to this name
                                      is the commit
    <entry>                           installed

So the newest checkpoint stays whole and readable whenever the processes are killed, also while a
checkpoint of the same tag replaces it and although a full one is several files.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from smdistributed.modelparallel.common.checkpoint.durable_files import (
    FileRecord,
    Writer,
    flush_directory,
    make_directory,
    rename,
    write_and_flush,
    write_file,
)
from smdistributed.modelparallel.common.errors import CheckpointError

FULL_FILES = ("model", "optimizer", "user_content")
MANIFEST = "manifest.json"

#: Of the names of a full checkpoint's files; the model's is the tag itself.
_PREFIXES = tuple(f"{name}_" for name in FULL_FILES[1:])

_MANIFEST_FORMAT = 1
_NEWEST = "newest"
_STAGING, _COMMITTED, _REMOVED = ".staging-", ".committed-", ".removed-"


@dataclass(frozen=True)
class Tag:
    """Name of a checkpoint in its directory.

    Raises:
        ValueError: the name is no plain file name, or one that this layout needs for itself.
    """

    name: str
    is_partial: bool

    def __post_init__(self) -> None:
        reserved = self.name == _NEWEST or self.name.startswith((".", *_PREFIXES))
        if not self.name.isprintable() or "/" in self.name or not self.name.strip():
            raise ValueError(f"A checkpoint tag must be a plain file name, got {self.name!r}.")
        if reserved or self.name.endswith("_partial"):
            raise ValueError(
                f"A checkpoint tag must not be {_NEWEST!r}, start with '.', 'optimizer_' or "
                f"'user_content_', or end with '_partial', got {self.name!r}: choose another, "
                "such as the step."
            )

    def __str__(self) -> str:
        return f"{self.name} {'partial' if self.is_partial else 'full'}"

    @property
    def entry(self) -> str:
        """Name of the checkpoint's folder or model file."""
        return f"{self.name}_partial" if self.is_partial else self.name

    @classmethod
    def from_entry(cls, entry: str) -> Tag:
        """The tag whose `entry` this is."""
        return cls(entry.removesuffix("_partial"), entry.endswith("_partial"))


class Manifest(NamedTuple):
    """The files of a checkpoint; ``sequence`` grows with each save in the directory."""

    sequence: int
    files: dict[str, FileRecord]

    def is_folder(self, tag: Tag) -> bool:
        """Whether the checkpoint is a folder: only a full one of single files has a ``model``."""
        return tag.is_partial or FULL_FILES[0] not in self.files


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that can be read.

    Args:
        tag: its name.
        paths: where each file lies, by the name that it was written with.
        manifest: None for a full checkpoint that another program wrote; it is not verified.
    """

    tag: Tag
    paths: Mapping[str, Path]
    manifest: Manifest | None

    @property
    def sequence(self) -> int:
        """Position in the order of saves; 0 for one that another program wrote."""
        return self.manifest.sequence if self.manifest else 0

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading after its size and checksum have been verified.

        Raises:
            CheckpointError: the file is not part of the checkpoint, missing, changed, or a link in
                place of what this library saved.
        """
        if name not in self.paths:
            raise CheckpointError(
                f"Checkpoint '{self.tag}' has no file {name!r}; it has {sorted(self.paths)}."
            )
        path, expected = self.paths[name], self.manifest and self.manifest.files[name]
        try:
            stream = open(path, "rb", opener=expected and _open_no_link)  # noqa: SIM115 - returned
        except FileNotFoundError as error:
            size = f" of {expected.size_bytes} bytes" if expected else ""
            raise CheckpointError(
                f"Checkpoint '{self.tag}' is incomplete: the file {path}{size} is missing. "
                "Restore it, or resume from another tag."
            ) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise CheckpointError(
                    f"The files of a checkpoint must be readable files: {error}. Restore it, or "
                    "resume from another tag."
                ) from error
            raise CheckpointError(
                f"The files of a checkpoint must be files: {path} is a link, which may lead "
                "anywhere and is not followed. Put the file itself in its place, if you trust it."
            ) from error
        try:
            if expected is not None:
                expected.verify(stream, path)
        except BaseException:
            stream.close()
            raise
        return stream

    def verify(self) -> None:
        """Verify every file, as `open` does."""
        for name in self.paths:
            self.open(name).close()


class CheckpointStore:
    """The checkpoints below one path.

    Args:
        path: the directory; the first save makes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def newest(self) -> Tag | None:
        """The checkpoint saved last; None before the first.

        Raises:
            CheckpointError: the file `newest` is damaged.
        """
        path = self.path / _NEWEST
        try:
            # What is no text is no tag either, and is shown.
            text = path.read_text(encoding="utf-8", errors="backslashreplace")
        except FileNotFoundError:
            return None
        name, _, kind = text.removesuffix("\n").rpartition(" ")
        try:
            if kind not in ("partial", "full"):
                raise ValueError(f"Unknown kind {kind!r}.")
            return Tag(name, kind == "partial")
        except ValueError as error:
            raise CheckpointError(
                f"{path} must be one line '<tag> partial' or '<tag> full', got {text[:100]!r}: "
                "correct it, or resume with an explicit tag."
            ) from error

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints found, oldest first; damaged ones are left out."""
        found = []
        for entry in _list(self.path):
            name = entry.removeprefix(_COMMITTED)
            try:
                found.append(self._read(Tag.from_entry(name)))
            except (ValueError, CheckpointError):
                continue  # of no checkpoint; `resolve` tells what is wrong with a damaged one
        unique = {str(checkpoint.tag): checkpoint for checkpoint in found if checkpoint}
        return sorted(unique.values(), key=lambda checkpoint: checkpoint.sequence)

    def find(self, tag: str | int | None, *, partial: bool) -> Checkpoint:
        """The checkpoint of a tag, or the newest of its kind.

        Raises:
            CheckpointError: it is missing or damaged; lists the tags found.
        """
        kind = "partial" if partial else "full"
        if tag is not None:
            wanted: Tag | None = Tag(str(tag), partial)
        else:
            wanted = self.newest()
            if wanted is not None and wanted.is_partial != partial:
                same = [c.tag for c in self.checkpoints() if c.tag.is_partial == partial]
                wanted = same[-1] if same else None
        checkpoint = wanted and (self._read(wanted) or self._of_others(wanted))
        if checkpoint:
            return checkpoint
        missing = f"no {kind} checkpoint {wanted.name!r}" if wanted else f"no newest {kind} one"
        tags = ", ".join(f"'{c.tag}'" for c in self.checkpoints()) or "none"
        raise CheckpointError(f"There is {missing} in {self.path}; tags found: {tags}.")

    def prepare(self, tag: Tag, *, is_folder: bool) -> str:
        """Clear up after killed saves and make the staging folder; returns its name.

        Raises:
            CheckpointError: something that is no checkpoint stands in its place.
        """
        make_directory(self.path)
        for place in [self.path / tag.entry] if is_folder else self._full_places(tag).values():
            # Found after the commit, this would break every later save.
            if place.exists() and place.is_dir() != is_folder:
                kind = "file" if is_folder else "folder"
                raise CheckpointError(f"A {kind} is in the way: remove {place} or change the tag.")
        entries = _list(self.path)
        for entry in entries:
            if entry.startswith((_STAGING, _REMOVED, f".{_NEWEST}.")):
                _discard(self.path / entry)
        for entry in entries:
            if entry.startswith(_COMMITTED):
                self._complete(entry)
        name = f"{_STAGING}{tag.entry}-{secrets.token_hex(4)}"
        os.mkdir(self.path / name)
        return name

    def commit(
        self, tag: Tag, staging: Path, records: dict[str, FileRecord], keep: int | None
    ) -> None:
        """Make a staged checkpoint the newest, and remove the oldest partial ones beyond ``keep``.

        Raises:
            OSError: it could not be committed; nothing has changed.
            CheckpointError: it has been committed, but a later step failed.
        """
        sequence = 1 + max((checkpoint.sequence for checkpoint in self.checkpoints()), default=0)
        manifest = {
            "format": _MANIFEST_FORMAT,
            "sequence": sequence,
            "files": {name: records[name]._asdict() for name in sorted(records)},
        }
        text = json.dumps(manifest, indent=1).encode()
        write_and_flush(staging / MANIFEST, _bytes_writer(text))
        flush_directory(staging)
        rename(staging, self.path / f"{_COMMITTED}{tag.entry}")
        doing = "installing it"
        try:
            self._install(tag)
            doing = f"recording it in {_NEWEST!r}"
            write_file(self.path / _NEWEST, _bytes_writer(f"{tag}\n".encode()))
            doing = "removing older checkpoints"
            self._remove_old(tag, keep)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint is complete and can be resumed by its tag, but {doing} failed: "
                f"{error}"
            ) from error

    def _complete(self, entry: str) -> None:
        """Install what a killed save has committed; drop what no save has left."""
        committed = self.path / entry
        if committed.is_symlink() or not committed.is_dir():
            _discard(committed)
            return
        with contextlib.suppress(ValueError):  # the name is no tag's
            self._install(Tag.from_entry(entry.removeprefix(_COMMITTED)))

    def _install(self, tag: Tag) -> None:
        """Put a committed checkpoint in its place; can be repeated after a kill at any point."""
        committed = self.path / f"{_COMMITTED}{tag.entry}"
        manifest = _read_manifest(committed / MANIFEST)
        if manifest is None:  # all was moved out of it
            os.rmdir(committed)
        elif manifest.is_folder(tag):
            target, replaced = self.path / tag.entry, self.path / f"{_REMOVED}{tag.entry}"
            if os.path.lexists(target):
                os.rename(target, replaced)
            rename(committed, target)
            with contextlib.suppress(OSError):
                _discard(replaced)
        else:
            for name, target in self._full_places(tag).items():
                if name not in manifest.files:
                    target.unlink(missing_ok=True)
                elif (committed / name).exists():
                    os.replace(committed / name, target)
            flush_directory(self.path)
            # Until here the files are found through the manifest in `committed`.
            rename(committed / MANIFEST, self._full_manifest(tag))
            os.rmdir(committed)

    def _remove_old(self, newest: Tag, keep: int | None) -> None:
        if keep is None:
            return
        partial = [c.tag for c in self.checkpoints() if c.tag.is_partial and c.tag != newest]
        for tag in partial[: max(0, len(partial) - (keep - 1))]:
            # Renamed first, so that a kill leaves no half of it under its own name.
            removed = self.path / f"{_REMOVED}{tag.entry}"
            os.rename(self.path / tag.entry, removed)
            _discard(removed)

    def _read(self, tag: Tag) -> Checkpoint | None:
        committed = self.path / f"{_COMMITTED}{tag.entry}"
        manifest = None if committed.is_symlink() else _read_manifest(committed / MANIFEST)
        target = self.path / tag.entry
        if tag.is_partial or (manifest.is_folder(tag) if manifest else target.is_dir()):
            folder = committed
            if manifest is None:
                folder = target
                manifest = _read_manifest(folder / MANIFEST)
            if manifest is None and folder.is_dir() and tag.is_partial:
                raise CheckpointError(
                    f"{folder} has no {MANIFEST}, so it is an incomplete copy or was not written "
                    "by this library: copy it whole, or resume from another tag."
                )
            return manifest and Checkpoint(tag, {n: folder / n for n in manifest.files}, manifest)
        places = self._full_places(tag)
        if manifest is not None:
            moving = {name: committed / name for name in manifest.files}
            paths = {n: path if path.exists() else places[n] for n, path in moving.items()}
            return Checkpoint(tag, paths, manifest)
        manifest = _read_manifest(self._full_manifest(tag))
        if manifest is not None:
            return Checkpoint(tag, {name: places[name] for name in manifest.files}, manifest)
        if not places["model"].is_file():
            return None
        return Checkpoint(tag, {n: path for n, path in places.items() if path.is_file()}, None)

    def _of_others(self, tag: Tag) -> Checkpoint | None:
        """The files of a folder that another program wrote, which only its own tag finds."""
        folder = self.path / tag.entry
        if tag.is_partial or not folder.is_dir():
            return None
        files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
        return Checkpoint(tag, files, None)

    def _full_places(self, tag: Tag) -> dict[str, Path]:
        prefixes = ("", *_PREFIXES)
        return {
            name: self.path / f"{prefix}{tag.name}"
            for name, prefix in zip(FULL_FILES, prefixes, strict=True)
        }

    def _full_manifest(self, tag: Tag) -> Path:
        return self.path / f".manifest_{tag.name}.json"


def _read_manifest(path: Path) -> Manifest | None:
    try:
        with open(path, encoding="utf-8", opener=_open_no_link) as stream:
            content = json.load(stream)
        if content["format"] != _MANIFEST_FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {_MANIFEST_FORMAT}")
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        if outside := [name for name in files if not is_plain(name)]:
            raise ValueError(f"{outside[0]!r} is no name of a file beside it")
        return Manifest(content["sequence"], files)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"The manifest {path} is damaged ({type(error).__name__}: {error}): restore "
            "it, or resume from another tag."
        ) from error


def is_plain(name: str) -> bool:
    """Tells whether a name is that of a file in the folder itself, other than the manifest."""
    return name not in ("", ".", "..", MANIFEST) and "/" not in name and "\0" not in name


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _discard(path: Path) -> None:
    """Remove a folder and what is in it; or a file or a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _bytes_writer(data: bytes) -> Writer:
    def write(stream: BinaryIO) -> None:
        stream.write(data)

    return write


def _list(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []
