"""The document that describes a job: the body of ``CreateTrainingJob``, checked.

Every door ends in this document, and it is all that a back-end gets. Names are those of the service
interface; in Python they are spelled as Python spells names.

Source: estimator interface, sections 1 to 6; the public schema of ``CreateTrainingJob``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_pascal

from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError

#: Names become names of folders and variables: nothing in them leads anywhere else.
JobName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]
#: Of an experiment, a trial, or a component of trials.
EntityName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$")]
ChannelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")]
InputMode = Literal["File", "Pipe", "FastFile"]
#: Where scripts write what TensorBoard reads, unless they are told another place.
TENSORBOARD_PATH = "/opt/ml/output/tensorboard"
#: What the service takes, and this package keeps and does not read.
Unread = dict[str, Any]

_NAME = "letters and digits with dashes between them, at most 63"
_PATTERNS = {
    **dict.fromkeys(
        ("training_job_name", "model_name", "endpoint_config_name", "endpoint_name"), _NAME
    ),
    **dict.fromkeys(
        ("experiment_name", "trial_name", "trial_component_name", "run_name"),
        "letters and digits with dashes between them, at most 120",
    ),
    "channel_name": "letters, digits, '.', '_' and '-', at most 64, the first one not '.'",
}


class Part(BaseModel):
    """A part of the document."""

    model_config = ConfigDict(
        alias_generator=to_pascal, populate_by_name=True, extra="forbid", frozen=True
    )

    def as_json(self) -> dict[str, Any]:
        """Returns the document as the service has it, without what was left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


P = TypeVar("P", bound=Part)


class Metric(Part):
    """A number that is read from the log by a regular expression."""

    name: str
    regex: str


class Algorithm(Part):
    """What runs."""

    training_image: str | None = None
    algorithm_name: str | None = None
    training_input_mode: InputMode = "File"
    metric_definitions: tuple[Metric, ...] = ()
    enable_sage_maker_metrics_time_series: bool | None = None
    container_entrypoint: tuple[str, ...] | None = None
    container_arguments: tuple[str, ...] | None = None
    training_image_config: Unread | None = None


class S3Source(Part):
    """Data behind an address of an object store."""

    s3_data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    s3_uri: str
    s3_data_distribution_type: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    attribute_names: tuple[str, ...] | None = None
    instance_group_names: tuple[str, ...] | None = None


class FileSystemSource(Part):
    """Data on a shared file system."""

    file_system_id: str
    file_system_type: Literal["EFS", "FSxLustre"]
    directory_path: str
    file_system_access_mode: Literal["ro", "rw"] = "ro"


class FileSource(Part):
    """Data in a folder or file of this machine."""

    file_data_distribution_type: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    file_uri: str


class DataSource(Part):
    """Where a channel's data is: one of its fields."""

    s3_data_source: S3Source | None = None
    file_system_data_source: FileSystemSource | None = None
    file_data_source: FileSource | None = None

    @model_validator(mode="after")
    def _one(self) -> DataSource:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"names one source; got {', '.join(given) or 'none'}: keep one")
        return self

    @property
    def address(self) -> str:
        """Where it is, for people."""
        if self.s3_data_source:
            return self.s3_data_source.s3_uri
        if self.file_data_source:
            return self.file_data_source.file_uri
        assert self.file_system_data_source is not None
        source = self.file_system_data_source
        return f"{source.file_system_id}:{source.directory_path}"


class Shuffle(Part):
    """An order of the data that is drawn anew in each epoch."""

    seed: int


class Channel(Part):
    """A named input."""

    channel_name: ChannelName
    data_source: DataSource
    content_type: str | None = None
    compression_type: Literal["None", "Gzip"] | None = None
    record_wrapper_type: Literal["None", "RecordIO"] | None = None
    input_mode: InputMode | None = None
    shuffle_config: Shuffle | None = None


class Output(Part):
    """Where results go."""

    s3_output_path: str
    kms_key_id: str | None = None
    compression_type: Literal["GZIP", "NONE"] | None = None


class Resources(Part):
    """The hosts."""

    instance_type: str | None = None
    instance_count: Annotated[int, Field(ge=1)] = 1
    volume_size_in_gb: Annotated[int | None, Field(alias="VolumeSizeInGB")] = None
    volume_kms_key_id: str | None = None
    keep_alive_period_in_seconds: int | None = None
    instance_groups: tuple[Unread, ...] | None = None
    training_plan_arn: str | None = None


class Stopping(Part):
    """When a job is ended."""

    max_runtime_in_seconds: Annotated[int, Field(ge=1)] = 86400
    max_wait_time_in_seconds: Annotated[int | None, Field(ge=1)] = None
    max_pending_time_in_seconds: Annotated[int | None, Field(ge=1)] = None


class Checkpoints(Part):
    """A folder that is kept in step with an address."""

    s3_uri: str
    local_path: str = "/opt/ml/checkpoints"


class TensorBoardOutput(Part):
    """A folder whose files are kept at an address, below the name of the job."""

    s3_output_path: Annotated[str, Field(min_length=1)]
    local_path: str = TENSORBOARD_PATH


class Tag(Part):
    """A remark on a job."""

    key: str
    value: str


#: What the schema allows.
MOST_RETRIES = 30


class Retries(Part):
    """How often a job starts again that did not end by itself."""

    maximum_retry_attempts: Annotated[int, Field(ge=1, le=MOST_RETRIES)]


class ExperimentConfig(Part):
    """Which experiment and which of its trials a job belongs to."""

    experiment_name: EntityName | None = None
    trial_name: EntityName | None = None
    trial_component_display_name: str | None = None
    run_name: EntityName | None = None


class TrainingJob(Part):
    """What is to be done.

    Source: the public schema of ``CreateTrainingJob``.
    """

    training_job_name: JobName
    algorithm_specification: Algorithm
    role_arn: str = ""
    hyper_parameters: dict[str, str] = Field(default_factory=dict)
    input_data_config: tuple[Channel, ...] = ()
    output_data_config: Output
    resource_config: Resources
    stopping_condition: Stopping = Stopping()
    checkpoint_config: Checkpoints | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    tags: tuple[Tag, ...] = ()
    retry_strategy: Retries | None = None
    enable_managed_spot_training: bool = False
    enable_network_isolation: bool = False
    enable_inter_container_traffic_encryption: bool = False
    vpc_config: Unread | None = None
    debug_hook_config: Unread | None = None
    debug_rule_configurations: tuple[Unread, ...] | None = None
    tensor_board_output_config: TensorBoardOutput | None = None
    experiment_config: ExperimentConfig | None = None
    profiler_config: Unread | None = None
    profiler_rule_configurations: tuple[Unread, ...] | None = None
    remote_debug_config: Unread | None = None
    infra_check_config: Unread | None = None
    session_chaining_config: Unread | None = None

    @model_validator(mode="after")
    def _distinct(self) -> TrainingJob:
        names = [channel.channel_name for channel in self.input_data_config]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"names each channel once; got {', '.join(twice)} twice: rename one")
        return self


def read(document: Mapping[str, Any]) -> TrainingJob:
    """Checks a document.

    Raises:
        ConfigError: it breaks rules; lists every problem.
    """
    return validated(TrainingJob, document)


def validated(kind: type[P], document: Mapping[str, Any]) -> P:
    """Checks a document of some kind.

    Raises:
        ConfigError: it breaks rules; lists every problem.
    """
    try:
        return kind.model_validate(dict(document))
    except ValidationError as error:
        problems = [_in_words(kind, found) for found in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from None


def _in_words(kind: type[Part], problem: Any) -> str:
    place = ".".join(str(step) for step in problem["loc"]) or "the request"
    last = str(problem["loc"][-1]) if problem["loc"] else ""
    got = f"got {describe(problem['input'])}"
    if problem["type"] == "extra_forbidden":
        return unknown_key(place, _known(kind, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place} must be there; it is missing."
    if problem["type"] == "string_pattern_mismatch":
        rule = next(text for name, text in _PATTERNS.items() if to_pascal(name) == last)
        return f"{place} must have {rule}; {got}."
    if problem["type"] == "value_error":
        return f"{place} {problem['ctx']['error']}."
    return f"{place}: {problem['msg']}; {got}."


def _known(kind: type[Part], place: tuple[int | str, ...]) -> list[str]:
    """Returns the names beside the one at a place, each with the path before it."""
    model: Any = kind
    for step in place[:-1]:
        if isinstance(step, str):
            field = next(f for f in model.model_fields.values() if f.alias == step)
            model = _part_in(field.annotation)
    before = "".join(f"{step}." for step in place[:-1])
    return [f"{before}{field.alias}" for field in model.model_fields.values()]


def _part_in(annotation: Any) -> Any:
    """Returns the part that an annotation such as ``tuple[Part, ...] | None`` is about."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    return next(filter(None, map(_part_in, getattr(annotation, "__args__", ()))), None)
