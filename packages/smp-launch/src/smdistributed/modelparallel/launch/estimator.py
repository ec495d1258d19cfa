"""What the estimators share: they check what is given, write the document, start and follow jobs.

Source: estimator interface, sections 1 and 2.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.config import Framework as FrameworkName
from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch import inputs as channel_inputs
from smdistributed.modelparallel.launch.debugger import (
    TensorBoardOutputConfig,
    rule_configurations,
)
from smdistributed.modelparallel.launch.deployment import Deployable, TrainingJob
from smdistributed.modelparallel.launch.job import repository
from smdistributed.modelparallel.launch.job.code import ARCHIVE, Code, collect
from smdistributed.modelparallel.launch.job.contract import check_machine
from smdistributed.modelparallel.launch.request import distribution as strategies
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.arguments import settle
from smdistributed.modelparallel.launch.request.document import TENSORBOARD_PATH
from smdistributed.modelparallel.launch.request.naming import (
    Image,
    base_of,
    check_version,
    framework_image,
    job_name,
    parse_image,
)
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tracking import run

__all__ = ["Estimator", "EstimatorBase", "Framework", "TrainingJob"]


class EstimatorBase(Deployable):
    """Base of all estimators.

    Attributes:
        latest_training_job: the job of the last ``fit``, or None.
        jobs: all of them.
        sagemaker_session: where jobs live.
    """

    #: What the table of arguments calls the class.
    _kind: ClassVar[str] = "Estimator"

    entry_point: str | None
    source_dir: str | None
    dependencies: list[str]
    instance_count: int
    instance_type: str
    role: str
    output_path: str | None
    code_location: str | None
    base_job_name: str | None
    max_run: int
    input_mode: str
    environment: dict[str, str] | None
    metric_definitions: list[dict[str, str]] | None
    checkpoint_s3_uri: str | None
    checkpoint_local_path: str
    tensorboard_output_config: TensorBoardOutputConfig | None
    tags: Any
    rules: Any
    git_config: dict[str, Any] | None
    container_log_level: int
    use_spot_instances: bool
    max_wait: int | None
    max_retry_attempts: int | None
    image_uri: str | None
    distribution: dict[str, Any] | None = None

    def __init__(self, given: Mapping[str, Any]) -> None:
        settled = settle(self._kind, given)
        given_session = settled.pop("sagemaker_session")
        if isinstance(given_session, Session):
            self.sagemaker_session = given_session
        else:
            self.sagemaker_session = Session()
        self._hyperparameters = names.checked(settled.pop("hyperparameters"))
        for name, value in settled.items():
            setattr(self, name, value)
        self.dependencies = list(self.dependencies or ())
        self.jobs: list[TrainingJob] = []
        self.latest_training_job: TrainingJob | None = None
        #: Compatibility: notebooks read it, in place of the name of the latest job.
        self._current_job_name: str | None = None
        self._check()

    def set_hyperparameters(self, **values: Any) -> None:
        """Adds arguments of the script."""
        self._hyperparameters.update(values)

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the arguments of the script, and what hands the strategy on."""
        return {**self._hyperparameters, **self._strategy()}

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: bool | str | list[str] = True,
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
        run_tensorboard_locally: bool = False,
    ) -> None:
        """Starts a job, and follows it to its end.

        Args:
            inputs: a path or an address, for a channel named ``training``; a ``TrainingInput`` or a
                ``FileSystemInput``; or a dictionary of these by channel.
            wait: False returns as soon as the job is started; ``attach`` finds it again.
            logs: whether to show what the script prints.
            job_name: of the job; default one with the time in it.
            experiment_config: what the job belongs to, by ``ExperimentName`` and ``TrialName``;
                default the ``Run`` that is open.
            run_tensorboard_locally: says how to look at the results with TensorBoard.

        Raises:
            ConfigError: something that is given breaks a rule; nothing is started.
            StorageError: data is missing, or results cannot be written.
            UnexpectedStatusException: the job failed.
            UnknownExperimentError: there is no such experiment or trial.

        Source: estimator interface, section 2 (start).
        """
        if run_tensorboard_locally and not wait:
            raise ConfigError(
                "run_tensorboard_locally must come with wait; got wait=False: leave out one of "
                "them."
            )
        self._current_job_name = name = job_name or self._new_name()
        with self._code() as code:
            request = self._request(name, inputs, code)
            if config := experiment_config or run.current_config():
                request["ExperimentConfig"] = dict(config)
            started = self.sagemaker_session.start(request, code)
        self.latest_training_job = TrainingJob(self.sagemaker_session, name)
        self.jobs.append(self.latest_training_job)
        if run_tensorboard_locally:
            print(f"tensorboard --logdir {started.inside(self._tensorboard_path())}")
        if wait:
            self.latest_training_job.wait(logs)

    @classmethod
    def attach(
        cls,
        training_job_name: str,
        sagemaker_session: Session | None = None,
        model_channel_name: str = "model",
    ) -> Self:
        """Returns an estimator of a job that exists; if it still runs, shows it and waits.

        Raises:
            UnknownJobError: there is no such job.
            ConfigError: it is a job of another framework.
            UnexpectedStatusException: it failed while it was waited for.

        Source: estimator interface, section 2 (attach).
        """
        session = sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        job = session.job(training_job_name)
        before = session.observe(job)
        # Each class takes its arguments by their names, whatever its order of them.
        make: Any = cls
        arguments = cls._arguments_of(job.request().as_json())
        estimator: Self = make(**arguments, sagemaker_session=session)
        estimator.latest_training_job = TrainingJob(session, training_job_name)
        estimator.jobs.append(estimator.latest_training_job)
        if not before.is_final:
            estimator.latest_training_job.wait()
        return estimator

    def training_image_uri(self, region: str | None = None) -> str:
        """Returns the image that names framework and version; ``region`` is not looked at."""
        return self._image()

    def logs(self) -> None:
        """Shows the log of the latest job."""
        self.sagemaker_session.logs_for_job(self._latest().name)

    def _check(self) -> None:
        """Checks what is known before ``fit``."""
        count = self.instance_count
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                f"instance_count must be an integer of at least 1; got {describe(count)}."
            )
        check_machine(self.instance_type)
        if self.image_uri and parse_image(self.image_uri).framework is None:
            raise UnsupportedError(
                f"image_uri {self.image_uri!r} is no image of PyTorch or TensorFlow; others need a "
                "container, which is not offered: leave it out and give entry_point."
            )
        if not self.entry_point:
            raise ConfigError(f"{self._kind} needs entry_point, the script to run.")
        config = self.tensorboard_output_config
        if config is not None and not isinstance(config, TensorBoardOutputConfig):
            raise ConfigError(
                f"tensorboard_output_config must be a TensorBoardOutputConfig; got "
                f"{describe(config)}: import it from {TensorBoardOutputConfig.__module__}."
            )
        if self.git_config is not None:
            repository.check(self.git_config)
        if rule_configurations(self.rules):
            warnings.warn(
                "no effect here: rules, which no debugger evaluates.", ConfigWarning, stacklevel=4
            )
        names.encode(self._hyperparameters)
        self._strategy()

    def _framework(self) -> FrameworkName:
        return parse_image(self._image()).script_framework

    def _strategy(self) -> dict[str, Any]:
        return strategies.read(
            self.distribution, self._framework(), self.instance_count, self.instance_type
        )

    def _image(self) -> str:
        assert self.image_uri is not None
        return self.image_uri

    def _new_name(self) -> str:
        return job_name(self.base_job_name or parse_image(self._image()).repository)

    @contextlib.contextmanager
    def _code(self) -> Iterator[Code | None]:
        """Yields what to ship; None where the code is an archive elsewhere."""
        assert self.entry_point is not None
        if self.source_dir and "://" in self.source_dir.removeprefix("file://"):
            yield None
            return
        with contextlib.ExitStack() as kept:
            folder = None
            if self.git_config is not None:
                folder = kept.enter_context(repository.cloned(self.git_config))
            yield collect(self.entry_point, self.source_dir, self.dependencies, folder)

    def _own_hyperparameters(self) -> dict[str, Any]:
        return {}

    def _request(self, name: str, inputs: Any, code: Code | None) -> dict[str, Any]:
        """Returns the document."""
        root = str(self.sagemaker_session.root)
        place = (self.code_location or self.sagemaker_session.default_place()).rstrip("/")
        archive = f"{place}/{name}/{ARCHIVE}" if code else self.source_dir
        values = {
            **self.hyperparameters(),
            **self._own_hyperparameters(),
            names.SUBMIT_DIRECTORY: archive,
            names.PROGRAM: code.program if code else self.entry_point,
            names.LOG_LEVEL: self.container_log_level,
            names.JOB_NAME: name,
            names.REGION: self.sagemaker_session.boto_region_name,
        }
        algorithm: dict[str, Any] = {
            "TrainingImage": self._image(),
            "TrainingInputMode": self.input_mode,
        }
        if self.metric_definitions:
            algorithm["MetricDefinitions"] = self.metric_definitions
        stopping = {"MaxRuntimeInSeconds": self.max_run}
        if self.max_wait:
            stopping["MaxWaitTimeInSeconds"] = self.max_wait
        request: dict[str, Any] = {
            "TrainingJobName": name,
            "AlgorithmSpecification": algorithm,
            "RoleArn": self.role,
            "HyperParameters": names.encode(values),
            "InputDataConfig": channel_inputs.channels(inputs),
            "OutputDataConfig": {"S3OutputPath": self.output_path or root},
            "ResourceConfig": {
                "InstanceType": self.instance_type,
                "InstanceCount": self.instance_count,
            },
            "StoppingCondition": stopping,
        }
        return {**request, **self._optional_parts()}

    def _optional_parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if self.checkpoint_s3_uri:
            parts["CheckpointConfig"] = {
                "S3Uri": self.checkpoint_s3_uri,
                "LocalPath": self.checkpoint_local_path,
            }
        if self.environment:
            parts["Environment"] = self.environment
        if self.tags:
            pairs = (
                self.tags.items()
                if isinstance(self.tags, Mapping)
                else [(tag["Key"], tag["Value"]) for tag in self.tags]
            )
            parts["Tags"] = [{"Key": key, "Value": value} for key, value in pairs]
        if rules := rule_configurations(self.rules):
            parts["DebugRuleConfigurations"] = rules
        if self.use_spot_instances:
            parts["EnableManagedSpotTraining"] = True
        if self.max_retry_attempts:
            parts["RetryStrategy"] = {"MaximumRetryAttempts": self.max_retry_attempts}
        if self.tensorboard_output_config is not None:
            config = self.tensorboard_output_config
            parts["TensorBoardOutputConfig"] = {
                "S3OutputPath": config.s3_output_path,
                "LocalPath": config.local_path,
            }
        return parts

    def _tensorboard_path(self) -> str:
        config = self.tensorboard_output_config
        return config.local_path if config else TENSORBOARD_PATH

    @classmethod
    def _arguments_of(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of an estimator that would have started this job."""
        values = names.decode(request.get("HyperParameters", {}))
        strategy = strategies.of_hyperparameters(values)
        resources = request["ResourceConfig"]
        hyperparameters = names.of_script(values)
        hyperparameters.pop(names.MP_PARAMETERS, None)
        found = {
            "entry_point": values.get(names.PROGRAM),
            "source_dir": values.get(names.SUBMIT_DIRECTORY),
            "hyperparameters": hyperparameters,
            "instance_count": resources.get("InstanceCount", 1),
            "instance_type": resources.get("InstanceType", machines.LOCAL),
            "role": request.get("RoleArn"),
            "output_path": request["OutputDataConfig"]["S3OutputPath"],
            "base_job_name": base_of(request["TrainingJobName"]),
            "max_run": request["StoppingCondition"]["MaxRuntimeInSeconds"],
            "image_uri": request["AlgorithmSpecification"].get("TrainingImage"),
            "environment": request.get("Environment"),
        }
        if strategy is not None:
            found["distribution"] = strategy
        return found


class Estimator(EstimatorBase):
    """A job in an image that is named.

    An image of a framework stands for this Python environment; no container is started.

    Raises:
        ConfigError: an argument breaks a rule; see the table of arguments.
        UnsupportedError: an argument asks for what is not offered.

    Source: estimator interface, section 1.
    """

    def __init__(
        self,
        image_uri: str | None = None,
        role: str | None = None,
        instance_count: int | None = None,
        instance_type: str | None = None,
        **others: Any,
    ) -> None:
        given = {
            "image_uri": image_uri,
            "role": role,
            "instance_count": instance_count,
            "instance_type": instance_type,
        }
        if not (image_uri or others.get("image_name")):
            raise ConfigError("Estimator needs image_uri: name one, or use PyTorch or TensorFlow.")
        super().__init__({**given, **others})


class Framework(EstimatorBase):
    """Base of the estimators of frameworks."""

    _repository: ClassVar[str]
    py_version: str | None
    framework_version: str | None

    def _image(self) -> str:
        if self.image_uri:
            return self.image_uri
        version = check_version("framework_version", self.framework_version)
        return framework_image(self._repository, version, self.py_version, is_gpu=self._has_gpus())

    def _has_gpus(self) -> bool:
        return machines.num_gpus(self.instance_type) != 0

    @classmethod
    def _arguments_of(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        found = super()._arguments_of(request)
        image = parse_image(found.pop("image_uri") or "")
        if not cls._takes(image):
            raise ConfigError(
                f"{cls._kind}.attach takes jobs of {cls._kind}; {request['TrainingJobName']} runs "
                f"{image.repository}: attach with the estimator that started it."
            )
        return {**found, **cls._versions_in(image), "py_version": image.py_version}

    @classmethod
    def _takes(cls, image: Image) -> bool:
        """Tells whether an image is of this framework."""
        return image.repository == cls._repository

    @classmethod
    def _versions_in(cls, image: Image) -> dict[str, str | None]:
        """Returns the arguments that an image says."""
        return {"framework_version": image.framework_version}
