"""Channels of files: a folder for each, filled before the script starts.

Data of this machine is linked, never copied: the folders are the job's own, the files in them are
links.

Source: estimator interface, section 5.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.request.document import Channel
from smdistributed.modelparallel.launch.storage.places import Location, locate
from smdistributed.modelparallel.launch.storage.transfer import download

#: Whose value says where the shared file systems of ``FileSystemInput`` are.
FILE_SYSTEMS_VARIABLE = "SMP_FILE_SYSTEMS"


class Entry(NamedTuple):
    """A file of a channel: its name in the channel, and where it is."""

    name: str
    source: Location


@dataclass(frozen=True)
class Share:
    """Which of the hosts a channel is for; matters to channels that are dealt out to hosts."""

    host: int = 0
    num_hosts: int = 1


_ALONE = Share()


def check(channel: Channel, root: Path, mode: str, num_hosts: int = 1) -> None:
    """Checks, before a job starts, that a channel's data is there; says what has no effect.

    Raises:
        StorageError: it is not, or there are fewer files than hosts to deal them out to.
        UnsupportedError: the kind of data is not offered.
    """
    of_pipes = {
        "compression": channel.compression_type,
        "record_wrapping": channel.record_wrapper_type,
    }
    without = [name for name, word in of_pipes.items() if word not in (None, "None")]
    if without and mode != "Pipe":
        warnings.warn(
            f"channel {channel.channel_name}: {', '.join(without)} acts in input_mode 'Pipe' "
            "alone; files stay as they are.",
            ConfigWarning,
            stacklevel=4,
        )
    location = locate(address_of(channel), root)
    if location.local is None or _is_manifest(channel):
        return
    if not _matches(location.local):
        raise StorageError(
            f"channel {channel.channel_name}: there is nothing at {location.address} "
            f"({location.local}): correct the address."
        )
    if is_dealt(channel) and num_hosts > 1:
        entries_of(channel, root, Share(num_hosts - 1, num_hosts))


def fill(
    channel: Channel,
    target: Path,
    root: Path,
    mode: str,
    go_on: Callable[[], None] = lambda: None,
    share: Share = _ALONE,
) -> int:
    """Fills the folder of a channel; returns how many files it has.

    Args:
        channel: to fill.
        target: its folder.
        root: the folder of all jobs.
        mode: ``File`` or ``FastFile``.
        go_on: called before each file; raises to end the work.
        share: whose files, where they are dealt out.

    Raises:
        StorageError: data is missing or cannot be read.
    """
    location = locate(address_of(channel), root)
    folder = location.local
    is_whole = not _is_manifest(channel) and not (is_dealt(channel) and share.num_hosts > 1)
    if mode == "FastFile" and folder is not None and folder.is_dir() and is_whole:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder, target_is_directory=True)
        return len(list(folder.iterdir()))
    target.mkdir(parents=True, exist_ok=True)
    entries = entries_of(channel, root, share)
    for entry in entries:
        go_on()
        place = target / entry.name
        if not place.resolve().is_relative_to(target.resolve()):
            raise StorageError(
                f"channel {channel.channel_name}: {entry.source.address} would lie outside of the "
                f"channel's folder: rename it."
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        if path := entry.source.local:
            place.symlink_to(path)
        else:
            download(entry.source, place)
    return len(entries)


def entries_of(channel: Channel, root: Path, share: Share = _ALONE) -> list[Entry]:
    """Returns the files of a channel for a host, by their names.

    Raises:
        StorageError: there are none, or fewer than hosts to deal them out to.
    """
    location = locate(address_of(channel), root)
    found = list(_entries(channel, location, root))
    if not found:
        raise StorageError(
            f"channel {channel.channel_name}: there is nothing at {location.address}: correct the "
            "address."
        )
    if not is_dealt(channel) or share.num_hosts == 1:
        return found
    if len(found) < share.num_hosts:
        raise StorageError(
            f"channel {channel.channel_name}: 'ShardedByS3Key' deals files out to hosts; there are "
            f"{len(found)} for {share.num_hosts} hosts: divide the data into more, or use "
            "'FullyReplicated'."
        )
    return found[share.host :: share.num_hosts]


def is_dealt(channel: Channel) -> bool:
    """Tells whether each host has files of its own."""
    source = channel.data_source
    dealt = (
        source.s3_data_source and source.s3_data_source.s3_data_distribution_type,
        source.file_data_source and source.file_data_source.file_data_distribution_type,
    )
    return "ShardedByS3Key" in dealt


def address_of(channel: Channel) -> str:
    """Returns where the data of a channel is.

    Raises:
        StorageError: it is on a file system that is not here.
    """
    source = channel.data_source
    if source.s3_data_source is not None:
        return source.s3_data_source.s3_uri
    if source.file_data_source is not None:
        return source.file_data_source.file_uri
    assert source.file_system_data_source is not None
    shared = source.file_system_data_source
    places = _file_systems()
    if shared.file_system_id in places:
        return str(Path(places[shared.file_system_id], shared.directory_path.lstrip("/")))
    if Path(shared.directory_path).exists():
        return shared.directory_path
    raise StorageError(
        f"channel {channel.channel_name}: file system {shared.file_system_id} has no folder "
        f"{shared.directory_path} here: mount it there, or say where it is by "
        f'{FILE_SYSTEMS_VARIABLE}=\'{{"{shared.file_system_id}": "/path"}}\'.'
    )


def _file_systems() -> dict[str, str]:
    text = os.environ.get(FILE_SYSTEMS_VARIABLE, "{}")
    try:
        places = json.loads(text)
    except ValueError:
        places = None
    if not isinstance(places, dict):
        raise ConfigError(
            f"{FILE_SYSTEMS_VARIABLE} must be a JSON object of file systems and folders; got "
            f'{text!r}: write \'{{"fs-1": "/path"}}\'.'
        )
    return {str(name): str(path) for name, path in places.items()}


def _is_manifest(channel: Channel) -> bool:
    source = channel.data_source.s3_data_source
    return source is not None and source.s3_data_type != "S3Prefix"


def _entries(channel: Channel, location: Location, root: Path) -> Iterator[Entry]:
    source = channel.data_source.s3_data_source
    if source is not None and source.s3_data_type == "AugmentedManifestFile":
        raise UnsupportedError(
            f"channel {channel.channel_name}: AugmentedManifestFile is not offered: use S3Prefix "
            "or ManifestFile."
        )
    if _is_manifest(channel):
        yield from _listed(channel, location, root)
    elif location.local is not None:
        yield from _of_folder(location.local)
    else:
        yield from _of_store(location)


def _matches(path: Path) -> list[Path]:
    """Returns the file or folder, else those whose names begin so, as keys of a store do."""
    if path.exists():
        return [path]
    if not path.parent.is_dir():
        return []
    return sorted(each for each in path.parent.iterdir() if each.name.startswith(path.name))


def _of_folder(path: Path) -> Iterator[Entry]:
    for match in _matches(path):
        base = match if match == path and match.is_dir() else match.parent
        files = sorted(match.rglob("*")) if match.is_dir() else [match]
        for file in files:
            if file.is_file():
                yield Entry(str(file.relative_to(base)), locate(str(file.resolve()), path))


def _of_store(location: Location) -> Iterator[Entry]:
    folder = location.path.rpartition("/")[0]
    try:
        keys = location.files.find(location.path)
        base = location.path if keys != [location.path] else folder
        if not keys:
            base = folder
            keys = [key for key in location.files.find(folder) if key.startswith(location.path)]
    except Exception as error:  # each store raises errors of its own
        raise StorageError(f"{location.address} cannot be listed: {error}.") from error
    scheme = location.address.partition("://")[0]
    for key in sorted(keys):
        name = str(PurePosixPath(key).relative_to(base))
        yield Entry(name, Location(f"{scheme}://{key}", location.files, key))


def _listed(channel: Channel, location: Location, root: Path) -> Iterator[Entry]:
    """Yields the files of a manifest: ``[{"prefix": ...}, "a", "b"]``."""
    try:
        listed = json.loads(location.files.cat_file(location.path))
        prefix, *rest = listed
        start = prefix["prefix"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"channel {channel.channel_name}: {location.address} must be a manifest, "
            f'[{{"prefix": "s3://bucket/"}}, "name", ...]; {type(error).__name__}: {error}.'
        ) from None
    for name in rest:
        yield Entry(str(name).lstrip("/"), locate(f"{start}{name}", root))
