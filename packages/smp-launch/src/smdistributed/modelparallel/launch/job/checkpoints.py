"""Keeps a folder in step with an address: restored first, copied while a job runs.

For checkpoints, and without restoring for what TensorBoard reads. A file is copied when it has been
still for two seconds; what says that a checkpoint is complete comes after the files that it is
about.

Source: estimator interface, section 1 (resume); distributed-troubleshooting-model-parallel.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.storage.places import Location
from smdistributed.modelparallel.launch.storage.transfer import download, upload

STILL_SECONDS = 2.0
_EVERY_SECONDS = 1.0
#: Beginnings of names of files that speak for others.
_LAST = ("manifest", "newest", "latest")


class Keeper:
    """Keeps one folder. A context manager: copies while its body runs, and once more at the end."""

    def __init__(
        self,
        folder: Path,
        target: Location,
        remark: Callable[[str], None],
        still_seconds: float = STILL_SECONDS,
    ) -> None:
        self._still_seconds = still_seconds
        self._folder = folder
        self._target = target
        self._remark = remark
        self._kept: dict[Path, tuple[int, int]] = {}
        self._end = threading.Event()

    def restore(self, go_on: Callable[[], None]) -> int:
        """Copies what an earlier job left; returns how many files.

        Args:
            go_on: called before each file; raises to end the work.

        Raises:
            StorageError: it cannot be read.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        files, start = self._target.files, self._target.path
        try:
            found = sorted(files.find(start)) if files.exists(start) else []
        except Exception as error:  # each store raises errors of its own
            raise StorageError(f"{self._target.address} cannot be read: {error}.") from error
        for key in found:
            go_on()
            name = str(PurePosixPath(key).relative_to(start))
            place = self._folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            download(self._at(name), place)
            self._kept[place] = _state(place)
        return len(found)

    def __enter__(self) -> Keeper:
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def copy(self, still_seconds: float = 0.0) -> None:
        """Copies what has changed, and has been still for some time.

        Raises:
            StorageError: it cannot be written; what is copied stays.
        """
        now, all_still = time.time(), True
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        for path in sorted(files, key=_place_in_order):
            try:
                state = _state(path)
                is_still = now - path.stat().st_mtime >= still_seconds
            except FileNotFoundError:
                continue  # the script tidies up
            if self._kept.get(path) == state:
                continue
            speaks_for_others = _place_in_order(path)[0] == 1
            if not is_still or (speaks_for_others and not all_still):
                all_still = False
                continue
            upload(path, self._at(path.relative_to(self._folder).as_posix()))
            self._kept[path] = state

    def _work(self) -> None:
        """Copies again and again; an address that is away is tried again."""
        said = ""
        while not self._end.wait(_EVERY_SECONDS):
            try:
                self.copy(self._still_seconds)
            except (StorageError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    self._remark(f"{self._folder.name}: {said} It is tried again")

    def _at(self, name: str) -> Location:
        target = self._target
        return Location(
            f"{target.address.rstrip('/')}/{name}", target.files, f"{target.path}/{name}"
        )


def _state(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _place_in_order(path: Path) -> tuple[int, str]:
    return int(path.name.lower().startswith(_LAST)), str(path)
