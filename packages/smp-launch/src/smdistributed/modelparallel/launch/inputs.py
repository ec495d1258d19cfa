"""What a job reads: channels, as ``fit`` takes them.

Source: estimator interface, sections 2 (inputs) and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError

__all__ = ["FileSystemInput", "ShuffleConfig", "TrainingInput", "s3_input"]

#: The name of a channel that is given without one.
_DEFAULT_CHANNEL = "training"
_WORDS: dict[str, tuple[str | None, ...]] = {
    "distribution": ("FullyReplicated", "ShardedByS3Key"),
    "compression": (None, "None", "Gzip"),
    "record_wrapping": (None, "None", "RecordIO"),
    "s3_data_type": ("S3Prefix", "ManifestFile", "AugmentedManifestFile"),
    "input_mode": (None, "File", "Pipe", "FastFile"),
}


class ShuffleConfig:
    """An order that is drawn anew in each epoch, from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


class TrainingInput:
    """A channel with settings of its own.

    Raises:
        ConfigError: a word is none of those that its setting has.

    Source: estimator interface, section 5 (channel object).
    """

    def __init__(
        self,
        s3_data: str,
        distribution: str | None = None,
        compression: str | None = None,
        content_type: str | None = None,
        record_wrapping: str | None = None,
        s3_data_type: str = "S3Prefix",
        instance_groups: Sequence[str] | None = None,
        input_mode: str | None = None,
        attribute_names: Sequence[str] | None = None,
        target_attribute_name: str | None = None,
        shuffle_config: ShuffleConfig | None = None,
    ) -> None:
        dealt = distribution or "FullyReplicated"
        given = {
            "distribution": dealt,
            "compression": compression,
            "record_wrapping": record_wrapping,
            "s3_data_type": s3_data_type,
            "input_mode": input_mode,
        }
        for name, value in given.items():
            if value not in _WORDS[name]:
                words = ", ".join(str(word) for word in _WORDS[name])
                raise ConfigError(f"{name} must be one of {words}; got {describe(value)}.")
        if instance_groups:
            raise ConfigError(
                f"instance_groups must be left out, since all hosts are of one kind; got "
                f"{describe(instance_groups)}."
            )
        address = _address(s3_data)
        if "://" in address:
            source: dict[str, Any] = {
                "S3DataSource": {
                    "S3DataType": s3_data_type,
                    "S3Uri": address,
                    "S3DataDistributionType": dealt,
                    **({"AttributeNames": list(attribute_names)} if attribute_names else {}),
                }
            }
        elif s3_data_type != "S3Prefix":
            raise ConfigError(
                f"s3_data_type {s3_data_type!r} is of an object store; got {address}: use s3://."
            )
        else:
            source = {"FileDataSource": {"FileDataDistributionType": dealt, "FileUri": address}}
        self.config: dict[str, Any] = {"DataSource": source}
        if compression is not None:
            self.config["CompressionType"] = compression
        if content_type is not None:
            self.config["ContentType"] = content_type
        if record_wrapping is not None:
            self.config["RecordWrapperType"] = record_wrapping
        if input_mode is not None:
            self.config["InputMode"] = input_mode
        if shuffle_config is not None:
            self.config["ShuffleConfig"] = {"Seed": shuffle_config.seed}


#: The former name.
s3_input = TrainingInput


class FileSystemInput:
    """A folder of a shared file system, which is mounted here or named by ``SMP_FILE_SYSTEMS``."""

    def __init__(
        self,
        file_system_id: str,
        file_system_type: str,
        directory_path: str,
        file_system_access_mode: str = "ro",
        content_type: str | None = None,
    ) -> None:
        self.config: dict[str, Any] = {
            "DataSource": {
                "FileSystemDataSource": {
                    "FileSystemId": file_system_id,
                    "FileSystemType": file_system_type,
                    "DirectoryPath": directory_path,
                    "FileSystemAccessMode": file_system_access_mode,
                }
            }
        }
        if content_type is not None:
            self.config["ContentType"] = content_type


def channels(inputs: Any) -> list[dict[str, Any]]:
    """Returns the channels of the document for what ``fit`` was given.

    Raises:
        ConfigError: it is nothing that ``fit`` takes.
    """
    if inputs is None:
        return []
    if not isinstance(inputs, Mapping):
        inputs = {_DEFAULT_CHANNEL: inputs}
    return [{"ChannelName": name, **_config(name, each)} for name, each in inputs.items()]


def _config(name: object, given: object) -> dict[str, Any]:
    if isinstance(given, (str, Path)):
        given = TrainingInput(str(given))
    config = getattr(given, "config", None)
    if not isinstance(config, dict):
        raise ConfigError(
            f"channel {name}: an input is a path, an address, a TrainingInput or a "
            f"FileSystemInput; got {describe(given)}."
        )
    return config


def _address(given: str) -> str:
    """Returns an address as it is, and a path in full: a job may run elsewhere."""
    path = given.removeprefix("file://")
    return given if "://" in path else str(Path(path).expanduser().absolute())
