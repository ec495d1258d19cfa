"""The folder of a job, and who may write in it.

One process writes the status: the job's supervisor, which holds a lock for its whole life; a lock,
not a process id, since ids come again. Who finds an unfinished job whose lock is free takes it and
records that the job failed, so no job is in progress for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError, UnknownJobError
from smdistributed.modelparallel.launch.job.detached import take_lock
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.request import document
from smdistributed.modelparallel.launch.request.document import TrainingJob
from smdistributed.modelparallel.launch.storage.places import OBJECT_STORE, make_private
from smdistributed.modelparallel.launch.storage.transfer import write_whole

_NUM_NAMED = 10


@dataclass(frozen=True)
class JobFolder:
    """The folder of a job; it mirrors ``/opt/ml`` of a container."""

    path: Path

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.path.name

    @property
    def root(self) -> Path:
        """The folder of all jobs."""
        return self.path.parent

    @property
    def code(self) -> Path:
        """The script and what it imports."""
        return self.path / "code"

    @property
    def packages(self) -> Path:
        """What was installed for the script alone."""
        return self.path / "packages"

    @property
    def data(self) -> Path:
        """A folder for each channel."""
        return self.path / "input/data"

    @property
    def config(self) -> Path:
        """Files that say how the job is configured."""
        return self.path / "input/config"

    @property
    def model(self) -> Path:
        """What becomes the model's archive."""
        return self.path / "model"

    @property
    def output(self) -> Path:
        """Other results, and the reason of a failure."""
        return self.path / "output"

    @property
    def checkpoints(self) -> Path:
        """What is kept in step with the address of checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """A log for each host."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """Numbers that were found in the log, one a line."""
        return self.path / "metrics.jsonl"

    def inside(self, path: str) -> str:
        """Returns what a path of a container, ``/opt/ml/...``, is here; others as they are."""
        if path == "/opt/ml":
            return str(self.path)
        if path.startswith("/opt/ml/"):
            return str(self.path / path.removeprefix("/opt/ml/"))
        return path

    def request(self) -> TrainingJob:
        """Returns the document."""
        return document.read(json.loads((self.path / "request.json").read_text(encoding="utf-8")))

    def status(self) -> Status:
        """Returns how the job stood when somebody last wrote it down."""
        try:
            text = (self.path / "status.json").read_text(encoding="utf-8")
            return Status.model_validate_json(text)
        except (OSError, ValidationError) as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise LaunchError(
                f"the status of job {self.name} cannot be read: {problem}. Delete {self.path} "
                "if the job is of no use."
            ) from None

    def write_status(self, status: Status) -> None:
        """Replaces the status; readers see the old or the new one, whole."""
        write_whole(self.path / "status.json", status.model_dump_json(by_alias=True, indent=1))

    def ask_to_stop(self) -> None:
        """Leaves word for the supervisor."""
        (self.path / "stop").touch()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether somebody left that word."""
        return (self.path / "stop").exists()

    def clear(self) -> None:
        """Removes code and data of an earlier run; a job may start again in its folder."""
        of_channels = (self.data, self.path / "input/hosts", self.path / "pipe_state")
        for place in (self.code, self.packages, *of_channels):
            shutil.rmtree(place, ignore_errors=True)

    def lock(self) -> int | None:
        """Takes the lock of the supervisor; returns its descriptor, or None if it is taken."""
        return take_lock(self.path / "supervisor.lock")

    def bury(self, reason: str, *, is_stopped: bool = False) -> Status:
        """Records that an unfinished job has ended whose supervisor is gone; returns the status.

        It has failed, unless it was stopped before it had one.

        A folder in which nothing can be written is no reason to say that the job goes on.
        """
        try:
            descriptor = self.lock()
        except OSError:
            return self._as_buried(reason, is_stopped)
        if descriptor is None:
            return self.status()
        try:
            buried = self._as_buried(reason, is_stopped)
            with contextlib.suppress(OSError):
                self.write_status(buried)
            return buried
        finally:
            os.close(descriptor)

    def _as_buried(self, reason: str, is_stopped: bool) -> Status:
        status = self.status()
        if status.is_final:
            return status
        if is_stopped:
            return status.entering("Stopped", reason, training_job_status="Stopped")
        return status.failed(reason)


@contextlib.contextmanager
def created(root: Path, request: TrainingJob, status: Status) -> Iterator[JobFolder]:
    """Makes the folder of a job, which goes again if the body fails.

    Raises:
        ConfigError: there is a job of this name.
    """
    make_private(root)
    folder = JobFolder(root / request.training_job_name)
    try:
        folder.path.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(
            f"each job has a name of its own; there is a job {folder.name} in {root}: choose "
            "another job_name, or none for one with the time in it."
        ) from None
    try:
        for place in (
            folder.logs,
            folder.model,
            folder.output / "data",
            folder.config,
            folder.data,
        ):
            place.mkdir(parents=True)
        write_whole(folder.path / "request.json", json.dumps(request.as_json(), indent=1))
        folder.write_status(status)
        yield folder
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def find(root: Path, name: str) -> JobFolder:
    """Returns the folder of a job.

    Raises:
        UnknownJobError: there is none of this name.
    """
    folders = {folder.name: folder for folder in all_jobs(root)}
    if name in folders:
        return folders[name]
    known = ", ".join(list(folders)[:_NUM_NAMED]) or "none"
    more = f" and {len(folders) - _NUM_NAMED} more" if len(folders) > _NUM_NAMED else ""
    raise UnknownJobError(f"there is no job {name!r} in {root}; the jobs there are: {known}{more}.")


def all_jobs(root: Path) -> list[JobFolder]:
    """Returns all jobs, the newest first."""
    if not root.is_dir():
        return []
    found = [entry for entry in root.iterdir() if entry.name != OBJECT_STORE]
    folders = [JobFolder(entry) for entry in found if (entry / "status.json").is_file()]
    return sorted(folders, key=_age_seconds)


def _age_seconds(folder: JobFolder) -> float:
    with contextlib.suppress(LaunchError):
        return time.time() - folder.status().creation_time
    return float("inf")
