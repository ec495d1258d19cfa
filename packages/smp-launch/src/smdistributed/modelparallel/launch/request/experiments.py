"""The documents that describe experiments: bodies of ``CreateExperiment`` and its like, checked.

Source: the public schemas of ``CreateExperiment``, ``CreateTrial``, ``CreateTrialComponent``,
``BatchPutMetrics`` and ``ExperimentConfig``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from smdistributed.modelparallel.launch.request.document import EntityName, Part, Tag, Unread


class Experiment(Part):
    """What somebody wants to find out."""

    experiment_name: EntityName
    display_name: str | None = None
    description: str | None = None
    tags: tuple[Tag, ...] = ()


class Trial(Part):
    """One attempt, of one experiment."""

    trial_name: EntityName
    experiment_name: EntityName
    display_name: str | None = None
    metadata_properties: Unread | None = None
    tags: tuple[Tag, ...] = ()


class ComponentStatus(Part):
    """How far a component is."""

    primary_status: Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"] | None = (
        None
    )
    message: str | None = None


class Parameter(Part):
    """A value: one of its fields."""

    string_value: str | None = None
    number_value: float | None = None


class Artifact(Part):
    """Where something lies that was read or made."""

    media_type: str | None = None
    value: str


class TrialComponent(Part):
    """A step of trials: what it was given, what it read and what it made."""

    trial_component_name: EntityName
    display_name: str | None = None
    status: ComponentStatus | None = None
    start_time: float | None = None
    end_time: float | None = None
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    input_artifacts: dict[str, Artifact] = Field(default_factory=dict)
    output_artifacts: dict[str, Artifact] = Field(default_factory=dict)
    metadata_properties: Unread | None = None
    tags: tuple[Tag, ...] = ()


class Number(Part):
    """A number at a time."""

    metric_name: str
    value: float
    timestamp: float
    step: Annotated[int | None, Field(ge=0)] = None


class Numbers(Part):
    """Numbers of a component."""

    trial_component_name: EntityName
    metric_data: tuple[Number, ...]
