"""Where jobs live on this machine, and what an address stands for.

Source: estimator interface, section 0 (local service in one paragraph).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import platformdirs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.exceptions import StorageError

JOBS_VARIABLE = "SMP_JOBS"
#: Folder below the jobs' that stands for an object store which nobody configured.
OBJECT_STORE = "s3"
#: The endpoint whose object store is that folder: who can, goes there and not through a server.
FOLDER_STORE_VARIABLE = "SMP_FOLDER_STORE"
#: Any of these, or the file of credentials, says that a real object store is meant.
_S3_SETTINGS = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
)
_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}


@dataclass(frozen=True)
class Location:
    """A file or folder that may be elsewhere.

    Attributes:
        address: as the user knows it.
        files: what reaches it.
        path: its name there.
    """

    address: str
    files: Any
    path: str

    @property
    def local(self) -> Path | None:
        """The path where it is on this machine, else None."""
        if isinstance(self.files, LocalFileSystem):
            return Path(self.path)
        if isinstance(self.files, DirFileSystem):
            return Path(self.files.path, self.path)
        return None


def jobs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of all jobs: ``SMP_JOBS``, else one in the user's home."""
    if chosen := environ.get(JOBS_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_state_path("smp-launch", appauthor=False) / "jobs"


def make_private(folder: Path) -> None:
    """Makes a folder and its missing parents, for this user alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def make_root(root: Path) -> None:
    """Makes the folder of all jobs, if it is not there.

    Raises:
        StorageError: nothing can be written there.
    """
    problem = ""
    try:
        make_private(root)
        if not os.access(root, os.W_OK | os.X_OK):
            problem = "it is read-only for this user"
    except OSError as error:
        problem = str(error)
    if problem:
        raise StorageError(
            f"the folder of the jobs must be writable; {root}: {problem}: choose another one by "
            f"{JOBS_VARIABLE}."
        )


def locate(address: str, root: Path, environ: Mapping[str, str] = os.environ) -> Location:
    """Returns what an address stands for.

    Without settings of an object store, ``s3://bucket/key`` is a file below the folder of the jobs.

    Args:
        address: ``s3://bucket/key``, ``gs://bucket/key``, ``file:///path`` or a path.
        root: the folder of the jobs.
        environ: says where object stores are.

    Raises:
        ConfigError: nothing is known of such addresses.
        UnsupportedError: what reaches them is not installed.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme == "file":
        path = Path(rest if separator else address).expanduser().absolute()
        return Location(address, LocalFileSystem(), str(path))
    if scheme not in _EXTRAS:
        raise ConfigError(
            f"an address begins with s3://, gs:// or file://, or is a path; got {address!r}: copy "
            "the data to one of these."
        )
    if ".." in rest.split("/"):
        raise ConfigError(f"an address must not have '..' in it; got {address!r}: write it out.")
    if scheme == "s3" and not has_object_store(environ):
        folder = root / OBJECT_STORE
        make_private(folder)
        return Location(address, DirFileSystem(str(folder)), rest.strip("/"))
    return Location(address, _remote(scheme, environ), rest.strip("/"))


def has_object_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Tells whether the user has said where s3:// is."""
    own = environ.get(FOLDER_STORE_VARIABLE)
    if own and own == environ.get("AWS_ENDPOINT_URL_S3", environ.get("AWS_ENDPOINT_URL")):
        return False
    file = environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return any(map(environ.get, _S3_SETTINGS)) or Path(file).expanduser().is_file()


def _remote(scheme: str, environ: Mapping[str, str]) -> Any:
    module, extra = _EXTRAS[scheme]
    try:
        importlib.import_module(module)
    except ImportError:
        raise UnsupportedError(
            f"{scheme}:// needs {module}, which is not installed: pip install "
            f"'smp-launch[{extra}]'."
        ) from None
    options: dict[str, Any] = {"skip_instance_cache": True}
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        options["endpoint_url"] = endpoint
    return fsspec.filesystem(scheme, **options)


def make_bucket(location: Location) -> None:
    """Makes a bucket, if it is not there.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        if folder := location.local:
            make_private(folder)
        elif not location.files.exists(location.path):
            location.files.mkdir(location.path)
    except Exception as error:  # each store raises errors of its own
        raise StorageError(
            f"the default bucket must be there; {location.address} cannot be made: {error}: name "
            "one of yours by Session(default_bucket=...)."
        ) from error


def check_writable(location: Location) -> None:
    """Checks, before anything starts, that results can go somewhere.

    Raises:
        StorageError: they cannot.
    """
    folder = location.local
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise StorageError(
            f"results must be writable; {location.address}: {error}: choose another output_path."
        ) from None
    if not is_writable:
        raise StorageError(
            f"results must be writable; {location.address} is not: choose another output_path."
        )
