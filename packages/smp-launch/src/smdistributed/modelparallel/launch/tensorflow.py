"""The estimator of TensorFlow, and what serves its models."""

from __future__ import annotations

from typing import Any, ClassVar

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.deserializers import JSONDeserializer
from smdistributed.modelparallel.launch.estimator import Framework
from smdistributed.modelparallel.launch.model import FrameworkModel
from smdistributed.modelparallel.launch.predictor import Predictor
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.serializers import JSONSerializer
from smdistributed.modelparallel.launch.session import Session

__all__ = ["TensorFlow", "TensorFlowModel", "TensorFlowPredictor"]

_MODEL_DIR = "/opt/ml/model"
#: A folder that all hosts of a job see, for what they write together.
_SHARED_MODEL_DIR = "/opt/ml/shared/model"


class TensorFlowPredictor(Predictor):
    """Asks an endpoint in TensorFlow Serving's REST form: ``instances`` become ``predictions``."""

    def __init__(
        self,
        endpoint_name: str,
        sagemaker_session: Session | None = None,
        serializer: Any = None,
        deserializer: Any = None,
    ) -> None:
        super().__init__(
            endpoint_name,
            sagemaker_session,
            serializer or JSONSerializer(),
            deserializer or JSONDeserializer(),
        )

    def classify(self, data: Any) -> Any:
        """Asks for labels and their scores: ``{"examples": [{"x": 1.0}]}``.

        Raises:
            ModelError: the model has no such signature, or refused the request.
        """
        return self.predict(data, custom_attributes="tfs-method=classify")

    def regress(self, data: Any) -> Any:
        """Asks for a number for each example: ``{"examples": [{"x": 1.0}]}``.

        Raises:
            ModelError: the model has no such signature, or refused the request.
        """
        return self.predict(data, custom_attributes="tfs-method=regress")


class TensorFlowModel(FrameworkModel):
    """A SavedModel in an archive; the script may have ``input_handler`` and ``output_handler``.

    Raises:
        ConfigError: an argument breaks a rule.

    Source: estimator interface, section 7 (from an archive).
    """

    _predictor = TensorFlowPredictor
    _repository: ClassVar[str] = "tensorflow-inference"


class TensorFlow(Framework):
    """Runs a TensorFlow script as a job.

    Raises:
        ConfigError: an argument breaks a rule; see the table of arguments.
        UnsupportedError: an argument asks for what is not offered.

    Source: estimator interface, section 1; model-parallel-sm-sdk.md.
    """

    _kind: ClassVar[str] = "TensorFlow"
    _repository: ClassVar[str] = "tensorflow-training"
    _model = TensorFlowModel
    model_dir: str | bool | None
    script_mode: bool | None

    def __init__(
        self,
        py_version: str | None = None,
        framework_version: str | None = None,
        model_dir: str | bool | None = None,
        image_uri: str | None = None,
        distribution: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        given = {
            "py_version": py_version,
            "framework_version": framework_version,
            "model_dir": model_dir,
            "image_uri": image_uri,
            "distribution": distribution,
        }
        super().__init__({**given, **others})

    def _check(self) -> None:
        if self.script_mode is False:
            raise ConfigError(
                "script_mode must be True or left out; got False: Legacy Mode is not offered."
            )
        super()._check()

    def _check_endpoint_type(self, given: Any) -> None:
        if given not in (None, "tensorflow-serving"):
            raise ConfigError(
                f"endpoint_type must be 'tensorflow-serving' or left out; got {describe(given)}: "
                "put input_handler and output_handler into an inference.py, and name it as "
                "entry_point."
            )

    def _own_hyperparameters(self) -> dict[str, Any]:
        """Returns where checkpoints and event files go, unless the script shall not be told."""
        if self.model_dir is False:
            return {}
        alone = self.instance_count == 1 or self._strategy().get(names.MPI_ENABLED)
        return {"model_dir": self.model_dir or (_MODEL_DIR if alone else _SHARED_MODEL_DIR)}

    @classmethod
    def _arguments_of(cls, request: Any) -> dict[str, Any]:
        found = super()._arguments_of(request)
        found["model_dir"] = found["hyperparameters"].pop("model_dir", False)
        return found
