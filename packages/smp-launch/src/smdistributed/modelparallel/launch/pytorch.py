"""The estimator of PyTorch, and what serves its models."""

from __future__ import annotations

from typing import Any, ClassVar

from smdistributed.modelparallel.launch.deserializers import NumpyDeserializer
from smdistributed.modelparallel.launch.estimator import Framework
from smdistributed.modelparallel.launch.model import FrameworkModel
from smdistributed.modelparallel.launch.predictor import Predictor
from smdistributed.modelparallel.launch.serializers import NumpySerializer
from smdistributed.modelparallel.launch.session import Session

__all__ = ["PyTorch", "PyTorchModel", "PyTorchPredictor"]


class PyTorchPredictor(Predictor):
    """Asks an endpoint by arrays, in NumPy's format."""

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
            serializer or NumpySerializer(),
            deserializer or NumpyDeserializer(),
        )


class PyTorchModel(FrameworkModel):
    """A model in an archive, and the script with its ``model_fn`` and the like.

    Raises:
        ConfigError: an argument breaks a rule.

    Source: estimator interface, section 7 (from an archive).
    """

    _predictor = PyTorchPredictor
    _repository: ClassVar[str] = "pytorch-inference"


class PyTorch(Framework):
    """Runs a PyTorch script as a job.

    Raises:
        ConfigError: an argument breaks a rule; see the table of arguments.
        UnsupportedError: an argument asks for what is not offered.

    Source: estimator interface, section 1; model-parallel-sm-sdk.md.
    """

    _kind: ClassVar[str] = "PyTorch"
    _repository: ClassVar[str] = "pytorch-training"
    _model = PyTorchModel

    def __init__(
        self,
        entry_point: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: dict[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        given = {
            "entry_point": entry_point,
            "framework_version": framework_version,
            "py_version": py_version,
            "source_dir": source_dir,
            "hyperparameters": hyperparameters,
            "image_uri": image_uri,
            "distribution": distribution,
        }
        super().__init__({**given, **others})
