"""A model that can be served: what ``deploy`` starts from.

Source: estimator interface, section 7; the public interface of the service's SDK.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job.code import ARCHIVE, collect
from smdistributed.modelparallel.launch.predictor import Predictor
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.naming import (
    base_of,
    check_version,
    framework_image,
    job_name,
    parse_image,
)
from smdistributed.modelparallel.launch.request.serving import PROGRAM, SUBMIT_DIRECTORY
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.storage.places import locate, make_private
from smdistributed.modelparallel.launch.storage.transfer import upload

__all__ = ["FrameworkModel", "Model"]

#: Arguments of the service's ``deploy`` that are accepted without effect.
_NOTED = (
    *("accelerator_type", "use_compiled_model", "kms_key", "data_capture_config", "volume_size"),
    *("model_data_download_timeout", "container_startup_health_check_timeout", "model_kms_key"),
    *("inference_recommendation_id", "explainer_config", "tags", "vpc_config_override"),
)
_REFUSED = {
    "serverless_inference_config": "leave it out: an endpoint is a process of this machine",
    "async_inference_config": "leave it out, and call predict in a thread",
}


class Model:
    """A model's archive, and what serves it.

    Args:
        image_uri: of an image that serves, which stands for this Python environment.
        model_data: the address or path of a ``model.tar.gz``.
        role: kept with the model; nothing is done with it.
        predictor_cls: what ``deploy`` returns one of; None for a ``Predictor``.
        env: variables of the server.
        name: of the model; default one with the time in it.
        sagemaker_session: where endpoints are.
        entry_point: the script with functions such as ``model_fn``.
        source_dir: folder of the script; or the address of an archive of it.
        dependencies: further folders and files, placed beside the script.

    Raises:
        ConfigError: an argument breaks a rule.
    """

    _predictor: ClassVar[type[Predictor]] = Predictor

    def __init__(
        self,
        image_uri: str | None = None,
        model_data: str | None = None,
        role: str | None = None,
        predictor_cls: Any = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        sagemaker_session: Session | None = None,
        entry_point: str | None = None,
        source_dir: str | None = None,
        dependencies: Sequence[str] | None = None,
        **others: Any,
    ) -> None:
        if not isinstance(model_data, str) or not model_data:
            raise ConfigError(
                f"model_data must be the address of a model.tar.gz; got {describe(model_data)}."
            )
        if others:
            noted = ", ".join(sorted(name for name, value in others.items() if value is not None))
            if noted:
                warnings.warn(f"no effect here: {noted}.", ConfigWarning, stacklevel=3)
        self.image_uri = image_uri
        self.model_data = model_data
        self.role = role
        self.predictor_cls = predictor_cls or self._predictor
        self.env = dict(env or {})
        self.name = name
        self.sagemaker_session = (
            sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        )
        self.entry_point = entry_point
        self.source_dir = source_dir
        self.dependencies = list(dependencies or ())
        self.endpoint_name: str | None = None

    def deploy(
        self,
        initial_instance_count: int | None = 1,
        instance_type: str | None = machines.LOCAL,
        serializer: Any = None,
        deserializer: Any = None,
        endpoint_name: str | None = None,
        wait: bool = True,
        **others: Any,
    ) -> Any:
        """Serves the model by a process of this machine; returns what asks it.

        Args:
            initial_instance_count: at least 1; there is one process.
            instance_type: as for estimators; without effect.
            serializer: of the predictor, if not its own.
            deserializer: of the predictor, if not its own.
            endpoint_name: default: the name of the model.
            wait: whether to wait until the model is loaded.
            others: arguments of the service's ``deploy``; without effect.

        Raises:
            ConfigError: an argument breaks a rule, or there is an endpoint of this name.
            LaunchError: the model cannot be loaded, or what serves it is not installed.

        Source: estimator interface, section 7 (endpoint).
        """
        _check(initial_instance_count, instance_type, others)
        serving = self.sagemaker_session.serving
        self.name = self.name or job_name(base_of(parse_image(self._image()).repository))
        name = endpoint_name or self.name
        serving.check_free(name)
        self.create()
        config = {"EndpointConfigName": name, "ProductionVariants": [{"ModelName": self.name}]}
        serving.create_endpoint_config(config, may_exist=True)
        try:
            serving.create_endpoint({"EndpointName": name, "EndpointConfigName": name})
        except BaseException:
            serving.delete_endpoint_config(name)
            raise
        self.endpoint_name = name
        if wait:
            status = serving.wait(name)
            if status.endpoint_status != "InService":
                raise LaunchError(
                    f"endpoint {name} is {status.endpoint_status}: {status.failure_reason}"
                )
        given = {"serializer": serializer, "deserializer": deserializer}
        chosen = {key: value for key, value in given.items() if value is not None}
        return self.predictor_cls(name, self.sagemaker_session, **chosen)

    def create(self, *_: Any, **__: Any) -> None:
        """Keeps the model, so that endpoints can serve it.

        Raises:
            ConfigError: there is another model of this name.
        """
        self.name = self.name or job_name(base_of(parse_image(self._image()).repository))
        container = {
            "Image": self._image(),
            "ModelDataUrl": self.model_data,
            "Environment": self._environment(),
        }
        self.sagemaker_session.serving.create_model(
            {
                "ModelName": self.name,
                "PrimaryContainer": container,
                "ExecutionRoleArn": self.role or "",
            },
            may_exist=True,
        )

    def delete_model(self) -> None:
        """Forgets the model; its archive stays."""
        self.sagemaker_session.serving.delete_model(str(self.name))

    def _image(self) -> str:
        if not self.image_uri:
            raise ConfigError("Model needs image_uri: name one, or use PyTorchModel.")
        return self.image_uri

    def _environment(self) -> dict[str, str]:
        """Returns the variables of the server; ships the script, if it is of this machine."""
        if self.entry_point is None:
            return self.env
        if self.source_dir and "://" in self.source_dir.removeprefix("file://"):
            return {PROGRAM: self.entry_point, SUBMIT_DIRECTORY: self.source_dir, **self.env}
        code = collect(self.entry_point, self.source_dir, self.dependencies)
        target = self.sagemaker_session.serving.place / "code" / str(self.name) / Path(ARCHIVE).name
        make_private(target.parent)
        with tempfile.TemporaryDirectory() as place:
            archive = Path(place, target.name)
            code.pack(archive)
            upload(archive, locate(str(target), self.sagemaker_session.root))
        return {PROGRAM: code.program, SUBMIT_DIRECTORY: str(target), **self.env}


class FrameworkModel(Model):
    """A model of a framework."""

    _repository: ClassVar[str]

    def __init__(
        self,
        model_data: str | None = None,
        role: str | None = None,
        entry_point: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        image_uri: str | None = None,
        **others: Any,
    ) -> None:
        self.framework_version = check_version("framework_version", framework_version)
        self.py_version = py_version
        super().__init__(image_uri, model_data, role, entry_point=entry_point, **others)

    def _image(self) -> str:
        if self.image_uri:
            return self.image_uri
        return framework_image(
            self._repository, self.framework_version, self.py_version, is_gpu=False
        )


def _check(count: Any, instance_type: Any, others: Mapping[str, Any]) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(
            f"initial_instance_count must be an integer of at least 1; got {describe(count)}."
        )
    if instance_type is None:
        raise ConfigError("deploy needs instance_type: use 'local'.")
    machines.check(instance_type)
    known = ("serializer", "deserializer", "endpoint_name", "wait", *_NOTED, *_REFUSED)
    if unknown := [name for name in others if name not in known]:
        raise ConfigError("\n".join(f"deploy: {unknown_key(name, known)}" for name in unknown))
    given = sorted(name for name, value in others.items() if value)
    for name in given:
        if name in _REFUSED:
            raise ConfigError(f"deploy: {name} is not offered: {_REFUSED[name]}.")
    if given:
        warnings.warn(f"no effect here: {', '.join(given)}.", ConfigWarning, stacklevel=3)
