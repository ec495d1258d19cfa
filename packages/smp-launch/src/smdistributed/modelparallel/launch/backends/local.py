"""Jobs on this machine, by a supervisor that outlives who starts it."""

from __future__ import annotations

from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job import detached
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.job.supervisor import MODULE

_GONE = (
    "InternalServerError: the supervisor of the job is gone: it was killed, the machine was "
    "restarted, or its disk is full. The last lines of logs/supervisor.log may say more."
)


class LocalBackend:
    """This machine."""

    name = "local"

    def submit(self, folder: JobFolder) -> None:
        """Starts a job in a session of its own."""
        descriptor = folder.lock()
        if descriptor is None:
            raise LaunchError(f"job {folder.name} has a supervisor already: wait for its end.")
        detached.start(MODULE, folder.path, descriptor, folder.logs / "supervisor.log")

    def observe(self, folder: JobFolder) -> Status:
        """Returns how a job stands."""
        status = folder.status()
        return status if status.is_final else folder.bury(_GONE)

    def stop(self, folder: JobFolder) -> None:
        """Leaves word; the supervisor looks for it ten times a second."""
        folder.ask_to_stop()
