"""The exceptions of the library.

Every message states the rule, what was received and the fix. Errors travel between processes, so
each class can be pickled with all its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence


class SMPError(Exception):
    """Base class of every error that this library raises on purpose."""


class ConfigError(SMPError, ValueError):
    """The configuration breaks a rule; the message lists every problem found."""


class NotInitializedError(SMPError, RuntimeError):
    """A name that needs ``smp.init`` was used before it."""


class NotPartitionedError(SMPError, RuntimeError):
    """A name that needs the partition of the model was used before the first step call."""


class UnsupportedError(SMPError, NotImplementedError):
    """A documented feature that this version does not have yet."""


class PartitionError(SMPError, ValueError):
    """The model cannot be cut as asked."""


class ScheduleError(SMPError, ValueError):
    """An order of pipeline actions does not fit the segments that it is for."""


class ScheduleDeadlock(ScheduleError):  # noqa: N818 - names what happened
    """An order of pipeline actions in which the ranks wait for each other for ever."""


class CheckpointError(SMPError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the model."""


class CommError(SMPError, RuntimeError):
    """A communication call cannot complete.

    Attributes:
        rank: global rank of the process that noticed, or None when unknown.
        missing_ranks: global ranks that died or did not come; the likely culprits.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, missing_ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.missing_ranks = tuple(missing_ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore_comm_error, (type(self), self.args[0], self.rank, self.missing_ranks))


def _restore_comm_error(
    kind: type[CommError], message: str, rank: int | None, missing_ranks: tuple[int, ...]
) -> CommError:
    return kind(message, rank=rank, missing_ranks=missing_ranks)
