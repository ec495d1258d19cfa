"""Keeps a folder in step with an address: restored first, copied while a job runs.

For checkpoints, and without restoring for what TensorBoard reads.

Source: estimator interface, section 1 (resume); distributed-troubleshooting-model-parallel.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.job.versions import Versions
from smdistributed.modelparallel.launch.storage.places import Location
from smdistributed.modelparallel.launch.storage.transfer import download, upload

_EVERY_SECONDS = 0.25
_AGAIN_SECONDS = 1.0


class Keeper:
    """Keeps one folder. A context manager: copies while its body runs; ``copy`` does the rest.

    Args:
        folder: to keep.
        target: where to.
        remark: tells the user.
        grows: whether files are copied while they are written.
    """

    def __init__(
        self,
        folder: Path,
        target: Location,
        remark: Callable[[str], None],
        *,
        grows: bool = False,
    ) -> None:
        self._folder = folder
        self._target = target
        self._remark = remark
        self._grows = grows
        self._versions = Versions(folder)
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
            self._versions.skip(place)
        return len(found)

    def __enter__(self) -> Keeper:
        # A copy may take minutes, and what comes meanwhile be deleted again.
        self._threads = [
            threading.Thread(target=each, name=f"checkpoints-{each.__name__}", daemon=True)
            for each in (self._look, self._work)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def copy(self) -> None:
        """Copies what is left, when nobody writes any more.

        Raises:
            StorageError: it cannot be written; what is copied stays.
        """
        try:
            self._versions.look()
            self._copy(only_whole=False)
        finally:
            self._versions.close()

    def _copy(self, *, only_whole: bool) -> None:
        for version in self._versions.waiting(only_whole=only_whole):
            upload(version.source, self._at(version.path.relative_to(self._folder).as_posix()))
            self._versions.take(version)

    def _look(self) -> None:
        while not self._end.wait(_EVERY_SECONDS):
            with contextlib.suppress(OSError):
                self._versions.look()

    def _work(self) -> None:
        """Copies again and again; an address that is away is tried again."""
        said, pause = "", _EVERY_SECONDS
        while not self._end.wait(pause):
            try:
                self._copy(only_whole=not self._grows)
                pause = _EVERY_SECONDS
            except (StorageError, OSError) as error:
                pause = _AGAIN_SECONDS
                if str(error) != said:
                    said = str(error)
                    self._remark(f"{self._folder.name}: {said} It is tried again")

    def _at(self, name: str) -> Location:
        target = self._target
        return Location(
            f"{target.address.rstrip('/')}/{name}", target.files, f"{target.path}/{name}"
        )
