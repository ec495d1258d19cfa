"""The estimator of Hugging Face's libraries, over PyTorch or TensorFlow."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.deserializers import JSONDeserializer
from smdistributed.modelparallel.launch.estimator import Framework
from smdistributed.modelparallel.launch.model import FrameworkModel
from smdistributed.modelparallel.launch.predictor import Predictor
from smdistributed.modelparallel.launch.request.naming import (
    Image,
    check_version,
    framework_image,
)
from smdistributed.modelparallel.launch.serializers import JSONSerializer
from smdistributed.modelparallel.launch.session import Session

__all__ = ["HuggingFace", "HuggingFaceModel", "HuggingFacePredictor"]

_TRANSFORMERS = re.compile(r"transformers([\d.]+\d)")


class HuggingFacePredictor(Predictor):
    """Asks an endpoint by JSON."""

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


class HuggingFaceModel(FrameworkModel):
    """A model of PyTorch in an archive, and the script with its ``model_fn`` and the like.

    Raises:
        ConfigError: an argument breaks a rule.
    """

    _predictor = HuggingFacePredictor
    _repository: ClassVar[str] = "huggingface-pytorch-inference"

    def __init__(
        self,
        role: str | None = None,
        model_data: str | None = None,
        entry_point: str | None = None,
        transformers_version: str | None = None,
        tensorflow_version: str | None = None,
        pytorch_version: str | None = None,
        **others: Any,
    ) -> None:
        check_version("transformers_version", transformers_version)
        check_version("tensorflow_version", tensorflow_version)
        super().__init__(model_data, role, entry_point, framework_version=pytorch_version, **others)
        if tensorflow_version is not None:
            raise UnsupportedError(
                "HuggingFaceModel serves models of PyTorch; got tensorflow_version: use "
                "TensorFlowModel."
            )


class HuggingFace(Framework):
    """Runs a script that uses Transformers as a job.

    Raises:
        ConfigError: an argument breaks a rule; see the table of arguments.
        UnsupportedError: an argument asks for what is not offered.

    Source: estimator interface, section 1 (further estimators).
    """

    _kind: ClassVar[str] = "HuggingFace"
    _model = HuggingFaceModel
    transformers_version: str | None
    pytorch_version: str | None
    tensorflow_version: str | None

    def __init__(
        self,
        py_version: str | None = None,
        entry_point: str | None = None,
        transformers_version: str | None = None,
        tensorflow_version: str | None = None,
        pytorch_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: dict[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        given = {
            "py_version": py_version,
            "entry_point": entry_point,
            "transformers_version": transformers_version,
            "tensorflow_version": tensorflow_version,
            "pytorch_version": pytorch_version,
            "source_dir": source_dir,
            "hyperparameters": hyperparameters,
            "image_uri": image_uri,
            "distribution": distribution,
        }
        super().__init__({**given, **others})

    def _check(self) -> None:
        given = (self.pytorch_version, self.tensorflow_version)
        if not self.image_uri and sum(version is not None for version in given) != 1:
            raise ConfigError(
                "HuggingFace needs one of pytorch_version and tensorflow_version; got "
                f"{describe(self.pytorch_version)} and {describe(self.tensorflow_version)}."
            )
        super()._check()

    def _image(self) -> str:
        if self.image_uri:
            return self.image_uri
        framework = "pytorch" if self.pytorch_version else "tensorflow"
        version = check_version(
            f"{framework}_version", self.pytorch_version or self.tensorflow_version
        )
        with_ = check_version("transformers_version", self.transformers_version)
        both = f"{version}-transformers{with_}" if with_ else version
        repository = f"huggingface-{framework}-training"
        return framework_image(repository, both, self.py_version, is_gpu=self._has_gpus())

    @classmethod
    def _takes(cls, image: Image) -> bool:
        return image.framework is not None and image.repository.startswith("huggingface-")

    @classmethod
    def _versions_in(cls, image: Image) -> dict[str, str | None]:
        found = _TRANSFORMERS.search(image.tag)
        return {
            f"{image.framework}_version": image.framework_version,
            "transformers_version": found[1] if found else None,
        }
