"""The exceptions of the launch side, beside those of ``common.errors``."""

from __future__ import annotations

from collections.abc import Sequence

from smdistributed.modelparallel.common.errors import SMPError


class LaunchError(SMPError):
    """Base class of what this package raises on purpose and smp-common has no word for."""


class UnknownJobError(LaunchError, ValueError):
    """There is no job of this name."""


class UnknownEndpointError(LaunchError, ValueError):
    """There is no endpoint, configuration or model of this name."""


class UnknownExperimentError(LaunchError, ValueError):
    """There is no experiment, trial or component of this name."""


class ModelError(LaunchError, RuntimeError):
    """A model that is served refused a request, or failed.

    Attributes:
        status: of HTTP: 400 to 499 where the request is at fault.
        original_message: what the model, or its script, said.
    """

    def __init__(self, status: int, original_message: str) -> None:
        super().__init__(f"the model answered with status {status}: {original_message}")
        self.status = status
        self.original_message = original_message

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.status, self.original_message))


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
