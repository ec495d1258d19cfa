"""The documents that describe what is served: bodies of ``CreateModel`` and its like, checked.

Source: estimator interface, section 7; the public schemas of ``CreateModel``,
``CreateEndpointConfig`` and ``CreateEndpoint``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from smdistributed.modelparallel.launch.request.document import JobName, Part, Tag, Unread

#: Variables of a model's document: the script with its functions, and where that is.
PROGRAM = "SAGEMAKER_PROGRAM"
SUBMIT_DIRECTORY = "SAGEMAKER_SUBMIT_DIRECTORY"


class Container(Part):
    """A model, and what serves it."""

    image: str | None = None
    model_data_url: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    mode: str | None = None
    container_hostname: str | None = None
    image_config: Unread | None = None
    model_data_source: Unread | None = None
    model_package_name: str | None = None
    inference_specification_name: str | None = None
    multi_model_config: Unread | None = None
    additional_model_data_sources: tuple[Unread, ...] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Container:
        if self.model_data_url is None:
            raise ValueError("needs ModelDataUrl, the address of a model.tar.gz")
        if self.mode == "MultiModel":
            raise ValueError("has Mode 'MultiModel', which is not offered: deploy each model")
        return self


class ServedModel(Part):
    """A model that can be served."""

    model_name: JobName
    primary_container: Container | None = None
    containers: tuple[Container, ...] = ()
    inference_execution_config: Unread | None = None
    execution_role_arn: str = ""
    tags: tuple[Tag, ...] = ()
    vpc_config: Unread | None = None
    enable_network_isolation: bool = False

    @model_validator(mode="after")
    def _one(self) -> ServedModel:
        if len(self.containers) + (self.primary_container is not None) != 1:
            raise ValueError("has one container: give PrimaryContainer; chains are not offered")
        return self

    @property
    def container(self) -> Container:
        """The one container."""
        return self.primary_container or self.containers[0]


class Variant(Part):
    """Which model an endpoint serves; the number of hosts and their type have no effect."""

    variant_name: str = "AllTraffic"
    model_name: JobName
    initial_instance_count: Annotated[int | None, Field(ge=1)] = None
    instance_type: str | None = None
    initial_variant_weight: float | None = None
    accelerator_type: str | None = None
    serverless_config: Unread | None = None
    core_dump_config: Unread | None = None
    volume_size_in_gb: Annotated[int | None, Field(alias="VolumeSizeInGB")] = None
    model_data_download_timeout_in_seconds: int | None = None
    container_startup_health_check_timeout_in_seconds: int | None = None
    enable_ssm_access: Annotated[bool | None, Field(alias="EnableSSMAccess")] = None
    managed_instance_scaling: Unread | None = None
    routing_config: Unread | None = None
    inference_ami_version: str | None = None


class EndpointConfig(Part):
    """What an endpoint serves."""

    endpoint_config_name: JobName
    production_variants: Annotated[tuple[Variant, ...], Field(min_length=1, max_length=1)]
    data_capture_config: Unread | None = None
    tags: tuple[Tag, ...] = ()
    kms_key_id: str | None = None
    async_inference_config: Unread | None = None
    explainer_config: Unread | None = None
    shadow_production_variants: tuple[Unread, ...] | None = None
    execution_role_arn: str | None = None
    vpc_config: Unread | None = None
    enable_network_isolation: bool | None = None
    metrics_config: Unread | None = None


class Endpoint(Part):
    """A name, and the configuration behind it."""

    endpoint_name: JobName
    endpoint_config_name: JobName
    deployment_config: Unread | None = None
    tags: tuple[Tag, ...] = ()
