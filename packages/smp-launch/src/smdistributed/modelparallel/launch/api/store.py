"""The object store of the interface: files below the folder of the jobs, and moto's protocol.

The files are the truth, and the same that ``s3://`` names where no object store is configured:
what a client uploads is there for jobs, which link to it, and after a restart. moto answers
requests from its index, which is brought up to date with the files before each request, and the
files after it. Bytes are on disk alone. Types of content and other properties of objects last as
long as this process.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import shutil
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.exceptions import S3ClientError
from moto.s3.models import s3_backends

from smdistributed.modelparallel.common.checkpoint.durable_files import write_file
from smdistributed.modelparallel.launch.storage.places import OBJECT_STORE, make_private

_REGION = "us-east-1"
_PARTITION = "aws"
_READS = ("GET", "HEAD")
#: The bucket that the SDK makes for an account: notebooks spell its name, and rely on it.
_SDKS_DEFAULT = re.compile(rf"sagemaker-[a-z0-9-]+-{DEFAULT_ACCOUNT_ID}")
_PIECE_BYTES = 1 << 20


class _OnDisk:
    """The bytes of an object, as moto reads them: a file that is open while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0

    def seek(self, place: int) -> None:
        self._place = place

    def read(self, size: int = -1) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(self._place)
            data = stream.read(size)
        self._place += len(data)
        return data

    def close(self) -> None:
        pass


class Store:
    """Buckets as folders, objects as files."""

    def __init__(self, root: Path) -> None:
        self._folder = root / OBJECT_STORE
        make_private(self._folder)
        self._lock = threading.RLock()
        self._states: dict[tuple[str, str], tuple[int, int]] = {}
        # moto's index is the process's; it may have what an earlier store had.
        self._index.reset()
        s3_backends.bucket_accounts.clear()

    @property
    def _index(self) -> Any:
        return s3_backends[DEFAULT_ACCOUNT_ID][_PARTITION]

    def problem(self, method: str, target: str) -> str:
        """Returns why a request cannot be met by files; empty if it can."""
        bucket, key, _ = _address(target)
        if method in _READS or not key:
            return ""
        parts = key.removesuffix("/").split("/")
        if any(part in ("", ".", "..") for part in (bucket, *parts)):
            return f"a key is the path of a file; got {key!r}: leave out empty parts and dots"
        file = self._folder.joinpath(bucket, *parts)
        above = next((each for each in file.parents if each.exists()), self._folder)
        if not above.is_dir() or (file.is_dir() and not key.endswith("/") and method != "DELETE"):
            return f"a key is the path of a file, so no key goes on where one ends; got {key!r}"
        return ""

    def before(self, target: str) -> None:
        """Brings moto's index up to date for a request."""
        bucket, key, _ = _address(target)
        with self._lock:
            for name in [bucket] if bucket else [each.name for each in self._folder.iterdir()]:
                self._see_bucket(name)
            if bucket not in self._index.buckets:
                return
            if key:
                self._see(bucket, key)
                return
            found = self._files(bucket)
            for name in {*found, *(n for b, n in self._states if b == bucket)}:
                self._see(bucket, name)

    def after(self, method: str, target: str) -> None:
        """Writes what a request changed to files."""
        bucket, key, query = _address(target)
        if method in _READS or not bucket:
            return
        with self._lock:
            place = self._folder / bucket
            if bucket not in self._index.buckets:
                if method == "DELETE" and not key and place.is_dir():
                    shutil.rmtree(place)
                return
            make_private(place)
            # Parts of an upload are no object before the POST that completes it.
            if key and (method == "POST" or "uploadId" not in query):
                self._keep(bucket, key, is_deleted=method == "DELETE")
            elif not key and method == "POST" and "delete" in query:
                for name in self._files(bucket):
                    self._keep(bucket, name, is_deleted=True)

    def _see_bucket(self, name: str) -> None:
        if _SDKS_DEFAULT.fullmatch(name):
            make_private(self._folder / name)
        if name in self._index.buckets or not (self._folder / name).is_dir():
            return
        try:
            self._index.create_bucket(name, _REGION)
        except S3ClientError:
            return  # a folder whose name no bucket has

    def _files(self, bucket: str) -> dict[str, Path]:
        place = self._folder / bucket
        files = (path for path in place.rglob("*") if path.is_file())
        return {path.relative_to(place).as_posix(): path for path in files}

    def _see(self, bucket: str, key: str) -> None:
        """Makes an entry of the index what its file says."""
        path = self._folder / bucket / key
        keys = self._index.buckets[bucket].keys
        if not path.is_file():
            # What moto alone knows of is a marker of a folder.
            if self._states.pop((bucket, key), None) and key in keys:
                keys.pop(key)
            return
        about = path.stat()
        state = (about.st_size, about.st_mtime_ns)
        if self._states.get((bucket, key)) == state:
            return
        # No hash of the content, which would be read for it: the dash says so to clients.
        etag = hashlib.md5(repr(state).encode(), usedforsecurity=False).hexdigest() + "-1"
        entry = self._index.put_object(bucket, key, b"", etag=etag, disable_notification=True)
        entry.last_modified = datetime.datetime.fromtimestamp(about.st_mtime, datetime.UTC)
        entry.last_modified = entry.last_modified.replace(tzinfo=None)
        self._bind(bucket, entry, path, state)

    def _keep(self, bucket: str, key: str, *, is_deleted: bool) -> None:
        """Makes a file what the entry of the index says."""
        path = self._folder / bucket / key.removesuffix("/")
        entry = self._index.buckets[bucket].keys.get(key)
        if entry is None or not hasattr(entry, "_value_buffer"):
            if is_deleted:
                self._states.pop((bucket, key), None)
                path.unlink(missing_ok=True) if path.is_file() else None
            return
        if key.endswith("/"):
            make_private(path)
        elif not isinstance(entry._value_buffer, _OnDisk):
            make_private(path.parent)
            entry._value_buffer.seek(0)
            write_file(
                path, lambda file: shutil.copyfileobj(entry._value_buffer, file, _PIECE_BYTES)
            )
            about = path.stat()
            self._bind(bucket, entry, path, (about.st_size, about.st_mtime_ns))

    def _bind(self, bucket: str, entry: Any, path: Path, state: tuple[int, int]) -> None:
        # The hash is of the bytes that moto has now.
        entry._etag = entry.etag.strip('"')
        entry._value_buffer.close()
        entry._value_buffer = _OnDisk(path)
        entry.contentsize = state[0]
        self._states[bucket, entry.name] = state


def _address(target: str) -> tuple[str, str, dict[str, list[str]]]:
    """Returns bucket, key and query of a request."""
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    return bucket, key, parse_qs(parts.query, keep_blank_values=True)
