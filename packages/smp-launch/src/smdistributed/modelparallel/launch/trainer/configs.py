"""What a ``ModelTrainer`` is given: what to run, on what, with which data, and where results go.

Source: the public classes of the service's SDK, version 3.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.request import document

__all__ = [
    "Channel",
    "CheckpointConfig",
    "Compute",
    "DataSource",
    "FileSystemDataSource",
    "InputData",
    "MetricDefinition",
    "Networking",
    "OutputDataConfig",
    "RetryStrategy",
    "S3DataSource",
    "ShuffleConfig",
    "SourceCode",
    "StoppingCondition",
    "Tag",
    "TensorBoardOutputConfig",
]


class Checked:
    """Says what is wrong with a value in the words of this package.

    Raises:
        ConfigError: a name is unknown, missing, or has a value of another kind.
    """

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            known = tuple(getattr(type(self), "model_fields", ()))
            words = [_in_words(type(self).__name__, each, known) for each in error.errors()]
            raise ConfigError("\n".join(words)) from None


def _in_words(kind: str, problem: Any, known: tuple[str, ...]) -> str:
    name = ".".join(str(step) for step in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return unknown_key(name, known, f"{kind}.")
    if problem["type"] == "missing":
        return f"{kind} needs {name}; it is missing."
    return f"{kind}.{name}: {problem['msg']}; got {describe(problem['input'])}."


class SourceCode(Checked, BaseModel):
    """What is run: a script with the hyperparameters as its arguments, or a command.

    Attributes:
        source_dir: the folder, or the ``.tar.gz``, that has it; a path or an address.
        requirements: a file in there that lists what to install first.
        entry_script: a Python or shell script in there.
        command: what a shell runs in there, in place of a script.
        args: more words of the command.
        ignore_patterns: names of what is left behind.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    source_dir: str | None = None
    requirements: str | None = None
    entry_script: str | None = None
    command: str | None = None
    args: list[str | int | float] | None = None
    ignore_patterns: list[str] | None = [
        ".env",
        ".git",
        "__pycache__",
        ".DS_Store",
        ".cache",
        ".ipynb_checkpoints",
    ]


class Compute(Checked, document.Resources, frozen=False):
    """The hosts; here they are parts of this machine."""

    enable_managed_spot_training: bool | None = None


class Networking(Checked, BaseModel):
    """Networks of the service; without effect here."""

    model_config = ConfigDict(extra="forbid")

    security_group_ids: list[str] | None = None
    subnets: list[str] | None = None
    enable_network_isolation: bool | None = None
    enable_inter_container_traffic_encryption: bool | None = None


class S3DataSource(Checked, document.S3Source, frozen=False):
    """Data behind an address of an object store."""


class FileSystemDataSource(Checked, document.FileSystemSource, frozen=False):
    """Data on a shared file system, which is mounted here or named by ``SMP_FILE_SYSTEMS``."""


class DataSource(Checked, document.DataSource, frozen=False):
    """Where a channel's data is: one of its fields."""


class Channel(Checked, document.Channel, frozen=False):
    """A named input, in full."""


class ShuffleConfig(Checked, document.Shuffle, frozen=False):
    """An order of the data that is drawn anew in each epoch."""


class InputData(Checked, BaseModel):
    """A named input: a path, an address, or a source.

    Attributes:
        channel_name: the script finds it by ``SM_CHANNEL_<NAME>``.
        data_source: where it is.
        content_type: kept with the job.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    channel_name: str
    data_source: str | FileSystemDataSource | S3DataSource
    content_type: str | None = None


class OutputDataConfig(Checked, BaseModel):
    """Where results go; default a place in the session's bucket."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    s3_output_path: str | None = None
    kms_key_id: str | None = None
    compression_type: str | None = None


class CheckpointConfig(Checked, BaseModel):
    """A folder of checkpoints, and the address that keeps them; default in the session's bucket."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    s3_uri: str | None = None
    local_path: str = "/opt/ml/checkpoints"


class TensorBoardOutputConfig(Checked, BaseModel):
    """A folder of TensorBoard's files and where they are kept; default in the session's bucket."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    s3_output_path: str | None = None
    local_path: str = document.TENSORBOARD_PATH


class StoppingCondition(Checked, document.Stopping, frozen=False):
    """When a job is ended."""


class MetricDefinition(Checked, document.Metric, frozen=False):
    """A number that is read from the log by a regular expression."""


class RetryStrategy(Checked, document.Retries, frozen=False):
    """How often a job starts again that did not end by itself."""


class Tag(Checked, document.Tag, frozen=False):
    """A remark on a job."""
