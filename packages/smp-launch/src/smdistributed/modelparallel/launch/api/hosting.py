"""The operations of the service that ``deploy``, ``predict`` and deletion need.

Source: the public schemas of the operations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.launch.exceptions import ModelError
from smdistributed.modelparallel.launch.request import naming
from smdistributed.modelparallel.launch.session import Session

#: Clients ask again after half a minute, and models are there in seconds.
_PATIENCE_SECONDS = 20.0
#: Headers of a request that reach the model.
_HEADERS = ("content-type", "accept", "x-amzn-sagemaker-custom-attributes")
Operation = Callable[[dict[str, Any]], dict[str, Any]]
Reply = tuple[int, dict[str, str], bytes]


class Hosting:
    """Answers requests about models and endpoints."""

    def __init__(self, session: Session) -> None:
        self._serving = session.serving
        self.known: dict[str, Operation] = {
            "CreateModel": self._create_model,
            "DescribeModel": self._describe_model,
            "DeleteModel": self._delete_model,
            "CreateEndpointConfig": self._create_config,
            "DescribeEndpointConfig": self._describe_config,
            "DeleteEndpointConfig": self._delete_config,
            "CreateEndpoint": self._create_endpoint,
            "DescribeEndpoint": self._describe_endpoint,
            "ListEndpoints": self._list_endpoints,
            "DeleteEndpoint": self._delete_endpoint,
        }

    def invoke(self, name: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Asks an endpoint; returns the status of HTTP, headers and body of the answer."""
        given = {header: headers[header] for header in _HEADERS if header in headers}
        try:
            reply = self._serving.invoke(name, body, given)
        except ModelError as error:
            document = {
                "OriginalStatusCode": error.status,
                "OriginalMessage": error.original_message,
                "Message": f"Received error ({error.status}) from model with message "
                f'"{error.original_message}".',
            }
            return 424, {"x-amzn-errortype": "ModelError"}, json.dumps(document).encode()
        except SMPError as error:
            kind = {"x-amzn-errortype": "ValidationError"}
            return 400, kind, json.dumps({"Message": str(error)}).encode()
        variant = {"x-amzn-Invoked-Production-Variant": "AllTraffic"}
        return 200, {"Content-Type": reply.content_type, **variant}, reply.body

    def _create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"ModelArn": naming.arn("model", self._serving.create_model(body))}

    def _describe_model(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["ModelName"]
        found = self._serving.model(name).as_json()
        return {**found, "ModelArn": naming.arn("model", name), "CreationTime": time.time()}

    def _delete_model(self, body: dict[str, Any]) -> dict[str, Any]:
        self._serving.delete_model(body["ModelName"])
        return {}

    def _create_config(self, body: dict[str, Any]) -> dict[str, Any]:
        name = self._serving.create_endpoint_config(body)
        return {"EndpointConfigArn": naming.arn("endpoint-config", name)}

    def _describe_config(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointConfigName"]
        arn = naming.arn("endpoint-config", name)
        found = self._serving.config(name).as_json()
        return {**found, "EndpointConfigArn": arn, "CreationTime": time.time()}

    def _delete_config(self, body: dict[str, Any]) -> dict[str, Any]:
        self._serving.delete_endpoint_config(body["EndpointConfigName"])
        return {}

    def _create_endpoint(self, body: dict[str, Any]) -> dict[str, Any]:
        name = self._serving.create_endpoint(body)
        self._serving.wait(name, _PATIENCE_SECONDS)
        return {"EndpointArn": naming.arn("endpoint", name)}

    def _describe_endpoint(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["EndpointName"]
        status = self._serving.endpoint(name)
        found = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        variant = {
            "VariantName": "AllTraffic",
            "CurrentWeight": 1.0,
            "DesiredWeight": 1.0,
            "CurrentInstanceCount": 1,
            "DesiredInstanceCount": 1,
        }
        return {
            **found,
            "EndpointArn": naming.arn("endpoint", name),
            "ProductionVariants": [variant],
        }

    def _list_endpoints(self, body: dict[str, Any]) -> dict[str, Any]:
        part = body.get("NameContains", "")
        names = [name for name in self._serving.endpoints() if part in name]
        keys = ("EndpointName", "EndpointArn", "CreationTime", "LastModifiedTime", "EndpointStatus")
        described = (self._describe_endpoint({"EndpointName": name}) for name in names)
        return {"Endpoints": [{key: each[key] for key in keys} for each in described]}

    def _delete_endpoint(self, body: dict[str, Any]) -> dict[str, Any]:
        self._serving.delete_endpoint(body["EndpointName"])
        return {}
