"""Models, configurations and endpoints by name, as the service has them.

Source: estimator interface, section 7; the public operations of hosting.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.exceptions import (
    LaunchError,
    ModelError,
    UnknownEndpointError,
)
from smdistributed.modelparallel.launch.job import detached
from smdistributed.modelparallel.launch.request.document import Part, validated
from smdistributed.modelparallel.launch.request.naming import parse_image
from smdistributed.modelparallel.launch.request.serving import (
    Endpoint,
    EndpointConfig,
    ServedModel,
)
from smdistributed.modelparallel.launch.serving import wire
from smdistributed.modelparallel.launch.serving.folder import EndpointFolder, EndpointStatus
from smdistributed.modelparallel.launch.storage.places import make_private
from smdistributed.modelparallel.launch.storage.transfer import write_whole

#: The Python whose environment has KServe, and the framework of the models.
PYTHON_VARIABLE = "SMP_SERVE_PYTHON"
#: What ``python -m`` runs.
_MODULE = "smdistributed.modelparallel.launch.serving.server"
#: Names of jobs do not begin so.
_FOLDER = ".serving"
_POLL_SECONDS = 0.1
_REQUEST_SECONDS = 60.0
_START_SECONDS = 600.0
#: What requests that are being answered have when an endpoint is deleted, and some more.
_END_SECONDS = 20.0
_KINDS: dict[type[Part], tuple[str, str]] = {
    ServedModel: ("models", "model_name"),
    EndpointConfig: ("configs", "endpoint_config_name"),
}
_WORDS = {"models": "model", "configs": "endpoint configuration"}
P = TypeVar("P", bound=Part)


class Serving:
    """What is served by the user of a folder of jobs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.place = root / _FOLDER

    def create_model(self, document: Mapping[str, Any], *, may_exist: bool = False) -> str:
        """Keeps a model; returns its name.

        Args:
            document: the body of ``CreateModel``.
            may_exist: whether the very same model may be there already.

        Raises:
            ConfigError: the document breaks rules, or there is a model of this name.
            UnsupportedError: its image is of no framework that is served.
        """
        model = validated(ServedModel, document)
        image = parse_image(model.container.image or "")
        if image.served_framework is None:
            raise UnsupportedError(
                f"model {model.model_name}: image {model.container.image!r} is no image of PyTorch "
                "or TensorFlow; others need a container, which is not offered."
            )
        return self._keep(model, may_exist)

    def create_endpoint_config(
        self, document: Mapping[str, Any], *, may_exist: bool = False
    ) -> str:
        """Keeps the configuration of endpoints; returns its name.

        Args:
            document: the body of ``CreateEndpointConfig``.
            may_exist: whether the very same configuration may be there already.

        Raises:
            ConfigError: the document breaks rules, or names a model that is not there.
        """
        config = validated(EndpointConfig, document)
        self.model(config.production_variants[0].model_name)
        return self._keep(config, may_exist)

    def create_endpoint(self, document: Mapping[str, Any]) -> str:
        """Starts an endpoint; returns its name. It is ``Creating`` until its model is loaded.

        Raises:
            ConfigError: the document breaks rules, or there is an endpoint of this name.
            UnknownEndpointError: it names a configuration that is not there.
            UnsupportedError: what serves is not installed.
        """
        python = _python()
        endpoint = validated(Endpoint, document)
        config = self.config(endpoint.endpoint_config_name)
        model = self.model(config.production_variants[0].model_name)
        folder = self._folder(endpoint.endpoint_name)
        make_private(folder.path.parent)
        try:
            folder.path.mkdir(mode=0o700)
        except FileExistsError:
            raise _taken(endpoint.endpoint_name) from None
        try:
            text = json.dumps(model.container.as_json(), indent=1)
            (folder.path / "container.json").write_text(text, encoding="utf-8")
            now = time.time()
            status = EndpointStatus(
                endpoint_name=endpoint.endpoint_name,
                endpoint_config_name=endpoint.endpoint_config_name,
                creation_time=now,
                last_modified_time=now,
            )
            folder.write_status(status)
            descriptor = folder.lock()
            assert descriptor is not None
            detached.start(_MODULE, folder.path, descriptor, folder.log, python)
        except BaseException as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise LaunchError(
                    f"the server of an endpoint cannot be started: {error}."
                ) from None
            raise
        return endpoint.endpoint_name

    def check_free(self, name: str) -> None:
        """Checks that there is no endpoint of a name.

        Raises:
            ConfigError: there is one.
        """
        if name in self.endpoints():
            raise _taken(name)

    def wait(self, name: str, seconds: float = _START_SECONDS) -> EndpointStatus:
        """Waits until an endpoint answers, or has failed; returns how it stands then."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.endpoint(name)
            if status.endpoint_status != "Creating" or time.monotonic() > deadline:
                return status
            time.sleep(_POLL_SECONDS)

    def endpoint(self, name: str) -> EndpointStatus:
        """Returns how an endpoint stands.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        try:
            return self._folder(name).observe()
        except (FileNotFoundError, NotADirectoryError):
            known = ", ".join(self.endpoints()) or "none"
            raise UnknownEndpointError(
                f"there is no endpoint {name!r} in {self._root}; the endpoints there are: {known}."
            ) from None

    def endpoints(self) -> list[str]:
        """Returns the names of all endpoints."""
        return sorted(path.parent.name for path in self.place.glob("endpoints/*/status.json"))

    def model(self, name: str) -> ServedModel:
        """Returns a model.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        return self._kept(ServedModel, name)

    def config(self, name: str) -> EndpointConfig:
        """Returns a configuration of endpoints.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        return self._kept(EndpointConfig, name)

    def invoke(
        self, name: str, body: bytes, headers: Mapping[str, str], *, target: str = "/invocations"
    ) -> wire.Reply:
        """Asks an endpoint.

        Args:
            name: of the endpoint.
            body: of the request.
            headers: ``Content-Type``, ``Accept`` and such.
            target: the path of the request.

        Raises:
            UnknownEndpointError: there is none of this name.
            LaunchError: it does not serve yet, or no more.
            ModelError: its model, or the model's script, refused the request or failed.
        """
        status = self.endpoint(name)
        if status.endpoint_status != "InService":
            why = f": {status.failure_reason}" if status.failure_reason else ""
            raise LaunchError(
                f"endpoint {name} must be InService to answer; it is {status.endpoint_status}{why}"
            )
        try:
            reply = wire.ask(self._folder(name).socket, target, body, headers, _REQUEST_SECONDS)
        except OSError as error:
            raise LaunchError(
                f"endpoint {name} does not answer ({error}); the last lines of "
                f"{self._folder(name).log} may say more."
            ) from None
        if reply.status >= 400:
            raise ModelError(reply.status, _message(reply.body))
        return reply

    def delete_endpoint(self, name: str) -> None:
        """Ends an endpoint; returns when its process is gone.

        Raises:
            UnknownEndpointError: there is none of this name.
            LaunchError: its process does not end.
        """
        self.endpoint(name)
        folder = self._folder(name)
        folder.ask_to_stop()
        deadline = time.monotonic() + _END_SECONDS
        while folder.is_alive:
            if time.monotonic() > deadline:
                raise LaunchError(f"the server of endpoint {name} does not end; see {folder.log}.")
            time.sleep(_POLL_SECONDS)
        shutil.rmtree(folder.path)

    def delete_endpoint_config(self, name: str) -> None:
        """Forgets a configuration.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        self._forget(EndpointConfig, name)

    def delete_model(self, name: str) -> None:
        """Forgets a model; its archive stays.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        self._forget(ServedModel, name)
        shutil.rmtree(self.place / "code" / name, ignore_errors=True)

    def _folder(self, name: str) -> EndpointFolder:
        return EndpointFolder(self.place / "endpoints" / _whole(name), self._root)

    def _file(self, kind: type[Part], name: str) -> Path:
        return self.place / _KINDS[kind][0] / f"{_whole(name)}.json"

    def _keep(self, part: Part, may_exist: bool) -> str:
        name = str(getattr(part, _KINDS[type(part)][1]))
        file = self._file(type(part), name)
        make_private(file.parent)
        if file.exists():
            if may_exist and json.loads(file.read_text()) == part.as_json():
                return name
            raise ConfigError(
                f"Cannot create already existing {_WORDS[_KINDS[type(part)][0]]} {name}: choose "
                "another name, or delete it."
            )
        write_whole(file, json.dumps(part.as_json(), indent=1))
        return name

    def _kept(self, kind: type[P], name: str) -> P:
        try:
            text = self._file(kind, name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UnknownEndpointError(f"there is no {_WORDS[_KINDS[kind][0]]} {name!r}.") from None
        return validated(kind, json.loads(text))

    def _forget(self, kind: type[Part], name: str) -> None:
        self._kept(kind, name)
        self._file(kind, name).unlink(missing_ok=True)


def _taken(name: str) -> ConfigError:
    return ConfigError(
        f"each endpoint has a name of its own; there is an endpoint {name}: delete it first "
        f"('smp-launch delete-endpoint {name}'), or choose another endpoint_name."
    )


def _python() -> str:
    """Returns the Python of servers."""
    if chosen := os.environ.get(PYTHON_VARIABLE):
        return chosen
    if importlib.util.find_spec("kserve") is None:
        raise UnsupportedError(
            "an endpoint needs kserve, which is not installed: pip install 'smp-launch[serve]', or "
            f"name a Python that has it, and smp-launch, by {PYTHON_VARIABLE}."
        )
    return sys.executable


def _whole(name: str) -> str:
    """Returns a name, which leads nowhere else."""
    if "/" in name or name in ("", ".", ".."):
        raise UnknownEndpointError(f"names have letters, digits and dashes; got {name!r}.")
    return name


def _message(body: bytes) -> str:
    """Returns the error in an answer."""
    text = body.decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, TypeError, KeyError):
        return text
