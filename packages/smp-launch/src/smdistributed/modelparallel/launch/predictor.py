"""An endpoint as a function.

Source: estimator interface, section 7 (predictor); the public interface of the service's SDK.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.deserializers import BytesDeserializer
from smdistributed.modelparallel.launch.serializers import IdentitySerializer
from smdistributed.modelparallel.launch.session import Session

__all__ = ["Predictor"]

#: What ``initial_args`` may have, and the header of each.
_HEADERS = {
    "ContentType": "Content-Type",
    "Accept": "Accept",
    "CustomAttributes": "X-Amzn-SageMaker-Custom-Attributes",
}


class Predictor:
    """Asks an endpoint.

    Args:
        endpoint_name: of the endpoint.
        sagemaker_session: where endpoints are.
        serializer: makes a request of what is given to ``predict``.
        deserializer: makes of an answer what ``predict`` returns.

    Attributes:
        endpoint_name: of the endpoint.
    """

    def __init__(
        self,
        endpoint_name: str,
        sagemaker_session: Session | None = None,
        serializer: Any = None,
        deserializer: Any = None,
    ) -> None:
        self.endpoint_name = endpoint_name
        self.sagemaker_session = (
            sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        )
        self.serializer = serializer or IdentitySerializer()
        self.deserializer = deserializer or BytesDeserializer()

    @property
    def endpoint(self) -> str:
        """The former name of ``endpoint_name``."""
        return self.endpoint_name

    @property
    def content_type(self) -> str:
        """The type of content of requests."""
        return str(self.serializer.CONTENT_TYPE)

    @property
    def accept(self) -> tuple[str, ...]:
        """The types of content of answers."""
        return tuple(self.deserializer.ACCEPT)

    def predict(
        self,
        data: Any,
        initial_args: Mapping[str, str] | None = None,
        target_model: str | None = None,
        target_variant: str | None = None,
        inference_id: str | None = None,
        custom_attributes: str | None = None,
    ) -> Any:
        """Asks the endpoint.

        Args:
            data: what the serializer takes.
            initial_args: ``ContentType``, ``Accept``, ``CustomAttributes``, if others than these of
                serializer and deserializer.
            target_model: refused: an endpoint has one model.
            target_variant: without effect: an endpoint has one variant.
            inference_id: without effect.
            custom_attributes: words for the model, with commas between them.

        Returns:
            what the deserializer makes of the answer.

        Raises:
            UnknownEndpointError: the endpoint is gone.
            ModelError: the model refused the request, or failed.
            LaunchError: the endpoint does not serve.
        """
        if target_model is not None:
            raise ConfigError(
                f"target_model must be left out, since an endpoint has one model; got "
                f"{describe(target_model)}."
            )
        given = dict(initial_args or {})
        given.pop("EndpointName", None)
        if unknown := sorted(set(given) - set(_HEADERS)):
            raise ConfigError(
                f"initial_args has {', '.join(_HEADERS)}; got {', '.join(unknown)}: leave it out."
            )
        if custom_attributes is not None:
            given["CustomAttributes"] = custom_attributes
        arguments = {"ContentType": self.content_type, "Accept": ", ".join(self.accept), **given}
        headers = {_HEADERS[name]: text for name, text in arguments.items()}
        body = self.serializer.serialize(data)
        if hasattr(body, "read"):
            body = body.read()
        if isinstance(body, str):
            body = body.encode()
        if not isinstance(body, (bytes, bytearray)):
            raise ConfigError(
                f"a request is bytes or a text; got {describe(body)}: give a serializer, such as "
                "JSONSerializer()."
            )
        reply = self.sagemaker_session.serving.invoke(self.endpoint_name, bytes(body), headers)
        return self.deserializer.deserialize(io.BytesIO(reply.body), reply.content_type)

    def delete_endpoint(self, delete_endpoint_config: bool = True) -> None:
        """Ends the endpoint, and forgets its configuration.

        Raises:
            UnknownEndpointError: it is gone already.
        """
        serving = self.sagemaker_session.serving
        config = serving.endpoint(self.endpoint_name).endpoint_config_name
        serving.delete_endpoint(self.endpoint_name)
        if delete_endpoint_config:
            serving.delete_endpoint_config(config)

    def delete_predictor(self, wait: bool = False) -> None:
        """The same."""
        self.delete_endpoint()

    def delete_model(self) -> None:
        """Forgets the model of the endpoint, which goes on; its archive stays.

        Raises:
            UnknownEndpointError: endpoint or model are gone already.
        """
        serving = self.sagemaker_session.serving
        config = serving.config(serving.endpoint(self.endpoint_name).endpoint_config_name)
        serving.delete_model(config.production_variants[0].model_name)

    def __str__(self) -> str:
        """Returns what it asks."""
        return f"{type(self).__name__}: {self.endpoint_name}"
