"""A job, by its name: how it stands, its log, its end.

Source: the public class of the service's SDK, version 3.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from pydantic.alias_generators import to_snake

from smdistributed.modelparallel.launch.exceptions import (
    LaunchError,
    UnexpectedStatusException,
)
from smdistributed.modelparallel.launch.session import Session

__all__ = ["FailedStatusError", "TimeoutExceededError", "TrainingJob"]

#: As version 3 calls it.
FailedStatusError = UnexpectedStatusException
_FINAL = ("Completed", "Failed", "Stopped")
#: Their keys are the user's own.
_FREE = ("HyperParameters", "Environment")


class TimeoutExceededError(LaunchError, TimeoutError):
    """A job has not ended in the time that was to be waited."""


class TrainingJob:
    """A job. Its attributes are those of its description, spelled as Python spells names.

    Attributes:
        training_job_name: its name.
        training_job_status: how it stood when it was last looked at.
    """

    training_job_name: str
    training_job_status: str

    def __init__(self, training_job_name: str, session: object = None) -> None:
        self._session = session if isinstance(session, Session) else Session()
        self.training_job_name = training_job_name
        self.refresh()

    @classmethod
    def get(cls, training_job_name: str, session: object = None, region: object = None) -> Any:
        """Returns a job.

        Raises:
            UnknownJobError: there is none of this name.
        """
        return cls(training_job_name, session)

    def get_name(self) -> str:
        """Returns its name."""
        return self.training_job_name

    def refresh(self) -> TrainingJob:
        """Looks at the job; returns it."""
        described = self._session.describe_training_job(self.training_job_name)
        for name, value in described.items():
            setattr(self, to_snake(name), value if name in _FREE else _spelled(value))
        return self

    def stop(self) -> None:
        """Asks the job to end."""
        self._session.stop_training_job(self.training_job_name)

    def wait(self, poll: float = 0.5, timeout: float | None = None, logs: bool = False) -> None:
        """Waits for the end of the job.

        Args:
            poll: seconds between two looks.
            timeout: most seconds to wait; with it, the log is shown at the end.
            logs: whether to show the log.

        Raises:
            UnexpectedStatusException: it failed.
            TimeoutExceededError: it goes on.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while timeout is not None and self.refresh().training_job_status not in _FINAL:
            if time.monotonic() > deadline:
                raise TimeoutExceededError(
                    f"job {self.training_job_name} goes on after {timeout:g} s: wait again, or "
                    "call stop()."
                )
            time.sleep(poll)
        try:
            self._session.logs_for_job(self.training_job_name, wait=True, with_logs=logs)
        finally:
            self.refresh()

    def __getattr__(self, name: str) -> Any:
        """Says what there is, where the description does not have it, or not yet."""
        there = ", ".join(sorted(each for each in vars(self) if not each.startswith("_")))
        raise AttributeError(f"the description of the job has no {name}; it has {there}.")


def _spelled(value: Any) -> Any:
    """Returns a part of the description as an object."""
    if isinstance(value, dict):
        return SimpleNamespace(**{to_snake(name): _spelled(each) for name, each in value.items()})
    return [_spelled(each) for each in value] if isinstance(value, (list, tuple)) else value
