"""``ModelTrainer``: writes the document of a job as version 3 of the SDK does, and starts the job.

Source: the public class of the service's SDK, version 3.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import yaml

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch import inputs as channel_inputs
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job import trainer
from smdistributed.modelparallel.launch.request.naming import job_name, parse_image
from smdistributed.modelparallel.launch.session import Session, get_execution_role
from smdistributed.modelparallel.launch.trainer import shipping
from smdistributed.modelparallel.launch.trainer.configs import (
    Channel,
    CheckpointConfig,
    Compute,
    InputData,
    MetricDefinition,
    OutputDataConfig,
    RetryStrategy,
    SourceCode,
    StoppingCondition,
    TensorBoardOutputConfig,
)
from smdistributed.modelparallel.launch.trainer.distributed import DistributedConfig
from smdistributed.modelparallel.launch.trainer.resources import TrainingJob

__all__ = ["Mode", "ModelTrainer"]

_MAX_RUNTIME_SECONDS = 3600
_INSTANCE_TYPE = "ml.m5.xlarge"
_NOTED = ("networking", "training_image_config", "local_container_root")
_REFUSED = {
    "algorithm_name": "give training_image and source_code",
    "model_package_config": "leave it out",
}


class Mode(Enum):
    """Where a job runs: on this machine, by either name."""

    LOCAL_CONTAINER = "LOCAL_CONTAINER"
    SAGEMAKER_TRAINING_JOB = "SAGEMAKER_TRAINING_JOB"


class ModelTrainer:
    """Runs a script or a command as a job.

    An image of a framework stands for this Python environment; no container is started.

    Raises:
        ConfigError: an argument breaks a rule.
        UnsupportedError: an argument asks for what is not offered.
    """

    _latest_training_job: TrainingJob | None

    def __init__(
        self,
        *,
        training_mode: Mode = Mode.SAGEMAKER_TRAINING_JOB,
        sagemaker_session: Session | None = None,
        role: str | None = None,
        base_job_name: str | None = None,
        input_s3_key_prefix: str | None = None,
        source_code: SourceCode | None = None,
        distributed: DistributedConfig | None = None,
        compute: Compute | None = None,
        stopping_condition: StoppingCondition | None = None,
        training_image: str | None = None,
        output_data_config: OutputDataConfig | None = None,
        input_data_config: Sequence[Channel | InputData] | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        training_input_mode: str = "File",
        environment: Mapping[str, str] | None = None,
        hyperparameters: Mapping[str, Any] | str | None = None,
        tags: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        _check_others(others)
        self.sagemaker_session = (
            sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        )
        self.training_mode = training_mode
        self.role = role or get_execution_role()
        self.source_code = _checked_source(source_code, distributed)
        self.distributed = distributed
        self.training_image = training_image
        self.base_job_name = base_job_name or f"{_repository(training_image)}-job"
        self.input_s3_key_prefix = input_s3_key_prefix
        self.compute = compute or Compute(instance_type=_INSTANCE_TYPE, instance_count=1)
        self.stopping_condition = stopping_condition or StoppingCondition(
            max_runtime_in_seconds=_MAX_RUNTIME_SECONDS
        )
        self.output_data_config = output_data_config or OutputDataConfig()
        self.input_data_config = list(input_data_config or ())
        self.checkpoint_config = checkpoint_config
        self.training_input_mode = training_input_mode
        self.environment = dict(environment or {})
        self.hyperparameters = _read(hyperparameters)
        self.tags = list(tags or ())
        self._tensorboard: TensorBoardOutputConfig | None = None
        self._retries: RetryStrategy | None = None
        self._metrics: list[MetricDefinition] = []
        self._latest_training_job = None

    @classmethod
    def from_recipe(cls, *_: Any, **__: Any) -> NoReturn:
        """Says that recipes are not offered.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("ModelTrainer.from_recipe is not offered: give source_code.")

    @classmethod
    def from_jumpstart_config(cls, *_: Any, **__: Any) -> NoReturn:
        """Says that the service's own models are not offered.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "ModelTrainer.from_jumpstart_config is not offered: give source_code."
        )

    def with_tensorboard_output_config(
        self, tensorboard_output_config: TensorBoardOutputConfig | None = None
    ) -> ModelTrainer:
        """Keeps what TensorBoard reads while the job runs; returns the trainer."""
        self._tensorboard = tensorboard_output_config or TensorBoardOutputConfig()
        return self

    def with_retry_strategy(self, retry_strategy: RetryStrategy) -> ModelTrainer:
        """Says how often the job starts again; returns the trainer."""
        self._retries = retry_strategy
        return self

    def with_checkpoint_config(
        self, checkpoint_config: CheckpointConfig | None = None
    ) -> ModelTrainer:
        """Keeps checkpoints; returns the trainer."""
        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        return self

    def with_metric_definitions(
        self, metric_definitions: Sequence[MetricDefinition]
    ) -> ModelTrainer:
        """Reads numbers from the log; returns the trainer."""
        self._metrics = list(metric_definitions)
        return self

    def train(
        self,
        input_data_config: Sequence[Channel | InputData] | None = None,
        wait: bool = True,
        logs: bool = True,
        dry_run: bool = False,
    ) -> None:
        """Starts a job, and follows it to its end.

        Args:
            input_data_config: channels; those of a name that the trainer has take its place.
            wait: False returns as soon as the job is started.
            logs: whether to show what the script prints.
            dry_run: checks what is known before a job, and starts none.

        Raises:
            ConfigError: something that is given breaks a rule; nothing is started.
            StorageError: data is missing, or results cannot be written.
            UnexpectedStatusException: the job failed.
        """
        given = {each.channel_name: each for each in self.input_data_config}
        given |= {each.channel_name: each for each in input_data_config or ()}
        name = job_name(self.base_job_name)
        channels = [_channel(each) for each in given.values()]
        if dry_run:
            return
        job = self.sagemaker_session.start(self._request(name, channels + self._shipped(name)))
        self._latest_training_job = TrainingJob(job.name, self.sagemaker_session)
        if wait:
            self._latest_training_job.wait(logs=logs)

    @property
    def output_data(self) -> str:
        """The address of the archive of the latest job's other output.

        Raises:
            LaunchError: nothing was trained yet.
        """
        job = self._latest_training_job
        if job is None:
            raise LaunchError("a trainer has output of a job; none was started: call train first.")
        place = job.output_data_config.s3_output_path.rstrip("/")
        return f"{place}/{job.training_job_name}/output/output.tar.gz"

    def _request(self, name: str, channels: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the document."""
        algorithm: dict[str, Any] = {
            "TrainingImage": self.training_image,
            "TrainingInputMode": self.training_input_mode,
            "ContainerEntrypoint": ["/bin/bash"],
            "ContainerArguments": ["-c", f"/opt/ml/input/data/{trainer.DRIVERS}/sm_train.sh"],
            "MetricDefinitions": [each.as_json() for each in self._metrics],
        }
        resources = self.compute.as_json()
        place = self.output_data_config.s3_output_path or self._in_bucket(self.base_job_name)
        request: dict[str, Any] = {
            "TrainingJobName": name,
            "AlgorithmSpecification": _given(algorithm),
            "RoleArn": self.role,
            "HyperParameters": {key: _text(each) for key, each in self.hyperparameters.items()},
            "InputDataConfig": channels,
            "OutputDataConfig": _given({"S3OutputPath": place}),
            "EnableManagedSpotTraining": resources.pop("EnableManagedSpotTraining", None),
            "ResourceConfig": resources,
            "StoppingCondition": self.stopping_condition.as_json(),
            "Environment": self.environment,
            "Tags": [_tag(each) for each in self.tags],
            "RetryStrategy": self._retries and self._retries.as_json(),
        }
        if config := self.checkpoint_config:
            uri = config.s3_uri or self._in_bucket(f"{self.base_job_name}/{name}/checkpoints")
            request["CheckpointConfig"] = {"S3Uri": uri, "LocalPath": config.local_path}
        if board := self._tensorboard:
            uri = board.s3_output_path or self._in_bucket(self.base_job_name)
            request["TensorBoardOutputConfig"] = {
                "S3OutputPath": uri,
                "LocalPath": board.local_path,
            }
        return _given(request)

    def _shipped(self, name: str) -> list[dict[str, Any]]:
        prefix = f"{self.input_s3_key_prefix or self.base_job_name}/{name}/input"
        return shipping.channels(self.source_code, self.distributed, self.sagemaker_session, prefix)

    def _in_bucket(self, key: str) -> str:
        session = self.sagemaker_session
        words = (session.default_bucket(), session.default_bucket_prefix, key)
        return f"s3://{'/'.join(filter(None, words))}"


def _check_others(others: Mapping[str, Any]) -> None:
    given = {name: value for name, value in others.items() if value is not None}
    for name in given:
        if name in _REFUSED:
            raise UnsupportedError(f"ModelTrainer: {name} is not offered: {_REFUSED[name]}.")
        if name not in _NOTED:
            known = [*(ModelTrainer.__init__.__kwdefaults__ or ()), *_NOTED, *_REFUSED]
            raise ConfigError(unknown_key(name, known, "ModelTrainer: "))
    if given:
        noted = ", ".join(sorted(given))
        warnings.warn(f"no effect here: {noted}.", ConfigWarning, stacklevel=3)


def _checked_source(source: SourceCode | None, distributed: DistributedConfig | None) -> SourceCode:
    if not isinstance(source, SourceCode):
        raise ConfigError(
            f"ModelTrainer needs source_code, a SourceCode, since images are not run here; got "
            f"{describe(source)}: give SourceCode(source_dir=..., entry_script=...)."
        )
    script, folder = source.entry_script, source.source_dir
    if not script and (distributed is not None or not source.command):
        raise ConfigError(
            "SourceCode needs entry_script, or command without distributed; got none."
        )
    if script and not script.endswith((".py", ".sh")):
        raise ConfigError(f"SourceCode.entry_script is a .py or a .sh file; got {script!r}.")
    if (script or source.requirements) and not folder:
        raise ConfigError("SourceCode needs source_dir, the folder of its files; got none.")
    if folder and "://" not in folder and not folder.endswith(".tar.gz"):
        for name in filter(None, (script, source.requirements)):
            if not Path(folder, name).is_file():
                raise ConfigError(
                    f"SourceCode: {name} must be a file in source_dir; there is none at "
                    f"{Path(folder, name).absolute()}: correct it."
                )
    return source


def _repository(image: str | None) -> str:
    return parse_image(image or "").repository or "training"


def _read(values: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Returns hyperparameters, which a file of JSON or YAML may have."""
    if isinstance(values, str):
        try:
            values = yaml.safe_load(Path(values).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"hyperparameters cannot be read: {error}.") from None
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(
            f"hyperparameters are values by their names, or a file of such; got {describe(values)}."
        )
    return dict(values or {})


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _given(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of the document without what says nothing."""
    return {name: value for name, value in document.items() if value not in (None, [], {})}


def _tag(given: Any) -> dict[str, str]:
    values = given if isinstance(given, Mapping) else given.model_dump()
    return {
        "Key": values.get("key", values.get("Key")),
        "Value": values.get("value", values.get("Value")),
    }


def _channel(given: Channel | InputData) -> dict[str, Any]:
    if isinstance(given, Channel):
        return given.as_json()
    if not isinstance(given, InputData):
        raise ConfigError(f"an input is an InputData or a Channel; got {describe(given)}.")
    source = given.data_source
    if isinstance(source, str):
        (channel,) = channel_inputs.channels({given.channel_name: source})
    else:
        kind = "S3DataSource" if hasattr(source, "s3_uri") else "FileSystemDataSource"
        channel = {"ChannelName": given.channel_name, "DataSource": {kind: source.as_json()}}
    return {**channel, **_given({"ContentType": given.content_type})}
