"""From a job to a model that is served: what an estimator does after ``fit``.

Source: estimator interface, sections 2 (job object) and 7.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.model import Model
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.serving import PROGRAM, SUBMIT_DIRECTORY
from smdistributed.modelparallel.launch.session import Session

#: Arguments of ``deploy`` that are of the model.
_OF_MODELS = ("entry_point", "source_dir", "dependencies", "env", "role", "image_uri")


class TrainingJob:
    """A job that an estimator started or attached to.

    Attributes:
        name: of the job.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self.name = name

    @property
    def job_name(self) -> str:
        """The same."""
        return self.name

    def describe(self) -> dict[str, Any]:
        """Returns the document of the job, and how it stands."""
        return self._session.describe_training_job(self.name)

    def wait(self, logs: bool | str | list[str] | None = True) -> None:
        """Waits for the end of the job, and shows its phases and its log.

        Raises:
            UnexpectedStatusException: it failed.
        """
        shown = bool(logs) and logs != "None"
        self._session.logs_for_job(self.name, wait=True, with_logs=shown)

    def rule_job_summary(self) -> list[dict[str, Any]]:
        """Returns how the rules of the debugger stand; nobody evaluates them here."""
        return list(self.describe().get("DebugRuleEvaluationStatuses", ()))

    def stop(self) -> None:
        """Asks the job to end."""
        self._session.stop_training_job(self.name)


class Deployable:
    """What has a latest job, whose model can be served.

    Attributes:
        latest_training_job: the job of the last ``fit``, or None.
        sagemaker_session: where jobs and endpoints live.
    """

    _model: ClassVar[type[Model]] = Model
    latest_training_job: TrainingJob | None
    sagemaker_session: Session
    role: str
    image_uri: str | None

    @property
    def model_data(self) -> str:
        """The address of the model's archive.

        Raises:
            LaunchError: nothing was trained yet, or the script left no model.
        """
        description = self._latest().describe()
        found = description.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        if found is None:
            raise LaunchError(
                f"a model is what the script writes into SM_MODEL_DIR; job {self._latest().name} "
                f"({description['TrainingJobStatus']}) left none."
            )
        return str(found)

    def create_model(self, **given: Any) -> Model:
        """Returns the model of the latest job, which can be deployed.

        Args:
            given: what its class takes: ``entry_point``, ``env``, ``name`` and such.

        Raises:
            LaunchError: nothing was trained yet, or the script left no model.
        """
        about = {
            "model_data": self.model_data,
            "role": self.role,
            "name": self._latest().name,
            "sagemaker_session": self.sagemaker_session,
            "image_uri": self.image_uri,
        }
        if "entry_point" not in given and "source_dir" not in given:
            given["env"] = {**self._script_of_job(), **(given.get("env") or {})}
        kind: Any = self._model
        return cast(Model, kind(**{**about, **given}))

    def deploy(
        self,
        initial_instance_count: int | None = 1,
        instance_type: str | None = machines.LOCAL,
        serializer: Any = None,
        deserializer: Any = None,
        endpoint_name: str | None = None,
        wait: bool = True,
        model_name: str | None = None,
        **others: Any,
    ) -> Any:
        """Serves the model of the latest job by a process of this machine; returns a predictor.

        Args:
            initial_instance_count: at least 1; there is one process.
            instance_type: as for estimators; without effect.
            serializer: of the predictor, if not its own.
            deserializer: of the predictor, if not its own.
            endpoint_name: default: the name of the job.
            wait: whether to wait until the model is loaded.
            model_name: default: the name of the job.
            others: what the model takes (``entry_point``, ``source_dir``, ``env``), and
                arguments of the service that have no effect here.

        Raises:
            ConfigError: an argument breaks a rule, or there is an endpoint of this name.
            LaunchError: there is no model, it cannot be loaded, or what serves it is not installed.

        Source: estimator interface, section 7 (endpoint).
        """
        of_model = {name: others.pop(name) for name in _OF_MODELS if name in others}
        if model_name:
            of_model["name"] = model_name
        self._check_endpoint_type(others.pop("endpoint_type", None))
        return self.create_model(**of_model).deploy(
            initial_instance_count,
            instance_type,
            serializer,
            deserializer,
            endpoint_name,
            wait,
            **others,
        )

    def _check_endpoint_type(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(
                f"endpoint_type is of TensorFlow alone; got {describe(given)}: leave it out."
            )

    def _script_of_job(self) -> dict[str, str]:
        """Returns what tells a model where its functions are: in the code of the job."""
        request = self.sagemaker_session.job(self._latest().name).request()
        values = names.decode(request.hyper_parameters)
        return {
            PROGRAM: values[names.PROGRAM],
            SUBMIT_DIRECTORY: values[names.SUBMIT_DIRECTORY],
        }

    def _latest(self) -> TrainingJob:
        if self.latest_training_job is None:
            raise LaunchError("there is no job yet: call fit, or attach to one.")
        return self.latest_training_job
