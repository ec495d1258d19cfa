"""The exceptions of the launch side, beside those of ``common.errors``."""

from __future__ import annotations

from collections.abc import Sequence

from smdistributed.modelparallel.common.errors import SMPError


class LaunchError(SMPError):
    """Base class of what this package raises on purpose and smp-common has no word for."""


class UnknownJobError(LaunchError, ValueError):
    """There is no job of this name."""


class StorageError(LaunchError, RuntimeError):
    """What an address names cannot be read or written."""


class UnexpectedStatusException(LaunchError, ValueError):  # noqa: N818 - the documented name
    """A job that was waited for ended in another way than well.

    Source: estimator interface, fit.

    Attributes:
        allowed_statuses: how it might have ended.
        actual_status: how it ended.
    """

    def __init__(self, message: str, allowed_statuses: Sequence[str], actual_status: str) -> None:
        super().__init__(message)
        self.allowed_statuses = tuple(allowed_statuses)
        self.actual_status = actual_status

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.allowed_statuses, self.actual_status))
