"""What every back-end can do."""

from __future__ import annotations

from typing import Any, Protocol

from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Status


class Backend(Protocol):
    """Runs jobs.

    Attributes:
        name: what the status of its jobs calls it.
    """

    name: str

    def submit(self, folder: JobFolder) -> None:
        """Starts a job; returns when it will run without this process.

        Raises:
            LaunchError: it cannot be started.
        """

    def observe(self, folder: JobFolder) -> Status:
        """Returns how a job stands; one whose supervisor is gone has failed."""

    def stop(self, folder: JobFolder) -> None:
        """Asks a job to end; it has time to save."""


def about(backend: Backend, **details: Any) -> dict[str, Any]:
    """Returns what the status of a job says of its back-end."""
    return {"kind": backend.name, **details}
