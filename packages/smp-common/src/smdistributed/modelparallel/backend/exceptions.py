"""Compatibility: launch tools take every class in here to recognise the errors of a job."""

from smdistributed.modelparallel.common.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    NotInitializedError,
    NotPartitionedError,
    PartitionError,
    ScheduleDeadlock,
    ScheduleError,
    SMPError,
    UnsupportedError,
)

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "NotInitializedError",
    "NotPartitionedError",
    "PartitionError",
    "SMPError",
    "ScheduleDeadlock",
    "ScheduleError",
    "UnsupportedError",
]
