"""Experiments, trials and components as objects: members of the service's documents, in Python.

Source: the public interface of the library ``smexperiments``.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from pydantic.alias_generators import to_pascal, to_snake

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch import utils
from smdistributed.modelparallel.launch.experiments.jobs import parameter
from smdistributed.modelparallel.launch.session import Session

_FORCE = "--force"


@dataclass
class TrialComponentArtifact:
    """Where something lies that was read or made."""

    value: str
    media_type: str | None = None


class Record:
    """What is kept under a name; its attributes are the members of its document."""

    _kind: ClassVar[str]
    #: Members that ``save`` writes, beside the name.
    _saved: ClassVar[tuple[str, ...]] = ("display_name",)
    display_name: str | None = None

    def __init__(self, session: Session, members: Mapping[str, Any]) -> None:
        self._session = session
        self._take(members)

    def save(self) -> None:
        """Writes what was changed."""
        given = {to_pascal(key): _document(getattr(self, key, None)) for key in self._saved}
        self._ask("Update", **{key: value for key, value in given.items() if value is not None})

    def delete(self) -> None:
        """Forgets this.

        Raises:
            ConfigError: something else holds it.
        """
        self._ask("Delete")

    @property
    def name(self) -> str:
        """What this is called."""
        return str(getattr(self, to_snake(f"{self._kind}Name")))

    def __repr__(self) -> str:
        return f"{self._kind}({self.name!r})"

    def _take(self, members: Mapping[str, Any]) -> None:
        vars(self).update({to_snake(key): _python(key, each) for key, each in members.items()})

    def _ask(self, verb: str, **members: Any) -> dict[str, Any]:
        body = {f"{self._kind}Name": self.name, **members}
        return self._session.experiments.known[f"{verb}{self._kind}"](body)

    @classmethod
    def made(cls, session: Session | None, **members: Any) -> Self:
        """Makes one in a session, from the members of its document; None for the default."""
        session = _session(session)
        given = {key: value for key, value in members.items() if value is not None}
        session.experiments.known[f"Create{cls._kind}"](given)
        return cls.of(session, members[f"{cls._kind}Name"])

    @classmethod
    def of(cls, session: Session | None, name: str) -> Self:
        """Returns one that a session has; None for the default."""
        session = _session(session)
        found = session.experiments.known[f"Describe{cls._kind}"]({f"{cls._kind}Name": name})
        return cls(session, found)

    @classmethod
    def all(cls, session: Session | None, **members: Any) -> Iterator[SimpleNamespace]:
        """Yields those that a session has; None for the default."""
        known = _session(session).experiments.known[f"List{cls._kind}s"]
        given = {key: _document(value) for key, value in members.items() if value is not None}
        for found in known(given)[f"{cls._kind}Summaries"]:
            yield _namespace(found)


class Experiment(Record):
    """What somebody wants to find out: trials.

    Attributes:
        experiment_name: what it is called.
        display_name: what people call it.
        description: of what it is about.
    """

    _kind = "Experiment"
    _saved = ("display_name", "description")
    experiment_name: str
    description: str | None = None

    @classmethod
    def create(
        cls,
        experiment_name: str | None = None,
        description: str | None = None,
        tags: list[dict[str, str]] | None = None,
        sagemaker_boto_client: object = None,
        display_name: str | None = None,
    ) -> Self:
        """Makes a new one; the client is not asked.

        Raises:
            ConfigError: a rule is broken, or there is one of this name.
        """
        return cls.made(
            None,
            ExperimentName=experiment_name,
            Description=description,
            DisplayName=display_name,
            Tags=tags,
        )

    @classmethod
    def load(cls, experiment_name: str, sagemaker_boto_client: object = None) -> Self:
        """Returns one that there is.

        Raises:
            UnknownExperimentError: there is none of this name.
        """
        return cls.of(None, experiment_name)

    @classmethod
    def list(
        cls,
        created_before: datetime.datetime | None = None,
        created_after: datetime.datetime | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        sagemaker_boto_client: object = None,
    ) -> Iterator[SimpleNamespace]:
        """Yields what there is, the newest first."""
        return cls.all(None, **listing(created_before, created_after, sort_by, sort_order))

    def create_trial(
        self, trial_name: str | None = None, trial_name_prefix: str = "SageMakerTrial"
    ) -> Trial:
        """Makes a trial of this experiment."""
        return Trial.made(
            self._session,
            TrialName=trial_name or utils.unique_name_from_base(trial_name_prefix),
            ExperimentName=self.name,
        )

    def list_trials(self, **choices: Any) -> Iterator[SimpleNamespace]:
        """Yields the trials of this experiment; choices are those of ``list``."""
        return Trial.all(self._session, ExperimentName=self.name, **listing(**choices))

    def delete_all(self, action: str) -> None:
        """Forgets this experiment, its trials and their components.

        Raises:
            ConfigError: the action is not ``--force``.
        """
        _check_force(action)
        for each in self.list_trials():
            Trial.of(self._session, each.trial_name).delete_all(action)
        self.delete()


class Trial(Record):
    """One attempt: components, of one experiment.

    Attributes:
        trial_name: what it is called.
        experiment_name: what it is a trial of.
    """

    _kind = "Trial"
    trial_name: str
    experiment_name: str

    @classmethod
    def create(
        cls,
        trial_name: str,
        experiment_name: str,
        sagemaker_boto_client: object = None,
        tags: list[dict[str, str]] | None = None,
        display_name: str | None = None,
    ) -> Self:
        """Makes a new one; the client is not asked.

        Raises:
            ConfigError: a rule is broken, or there is one of this name.
            UnknownExperimentError: there is no such experiment.
        """
        return cls.made(
            None,
            TrialName=trial_name,
            ExperimentName=experiment_name,
            DisplayName=display_name,
            Tags=tags,
        )

    @classmethod
    def load(cls, trial_name: str, sagemaker_boto_client: object = None) -> Self:
        """Returns one that there is.

        Raises:
            UnknownExperimentError: there is none of this name.
        """
        return cls.of(None, trial_name)

    @classmethod
    def list(
        cls,
        experiment_name: str | None = None,
        created_before: datetime.datetime | None = None,
        created_after: datetime.datetime | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        sagemaker_boto_client: object = None,
        trial_component_name: str | None = None,
    ) -> Iterator[SimpleNamespace]:
        """Yields what there is, the newest first."""
        return cls.all(
            None,
            ExperimentName=experiment_name,
            TrialComponentName=trial_component_name,
            **listing(created_before, created_after, sort_by, sort_order),
        )

    def add_trial_component(self, tc: Any) -> None:
        """Makes a component, or that of a tracker, one of this trial."""
        self._session.experiments.known["AssociateTrialComponent"](self._with(tc))

    def remove_trial_component(self, tc: Any) -> None:
        """Takes a component, or that of a tracker, out of this trial; it stays."""
        self._session.experiments.known["DisassociateTrialComponent"](self._with(tc))

    def list_trial_components(self, **choices: Any) -> Iterator[SimpleNamespace]:
        """Yields the components of this trial; choices are those of ``list``."""
        return TrialComponent.all(self._session, TrialName=self.name, **listing(**choices))

    def delete_all(self, action: str) -> None:
        """Forgets this trial and its components.

        Raises:
            ConfigError: the action is not ``--force``.
        """
        _check_force(action)
        for each in self.list_trial_components():
            component = TrialComponent.of(self._session, each.trial_component_name)
            component.delete(force_disassociate=True)
        self.delete()

    def _with(self, given: Any) -> dict[str, Any]:
        component = getattr(given, "trial_component", given)
        name = getattr(component, "trial_component_name", component)
        return {"TrialName": self.name, "TrialComponentName": name}


class TrialComponent(Record):
    """A step of trials; a job that belongs to a trial is one too.

    Attributes:
        trial_component_name: what it is called.
        parameters: numbers and texts by name.
        input_artifacts: what was read, by name; each has a ``value``, its address.
        output_artifacts: what was made.
        metrics: what each number was, as the service sums it up: min, max, avg, last.
    """

    _kind = "TrialComponent"
    _saved = (
        *("display_name", "status", "start_time", "end_time"),
        *("parameters", "input_artifacts", "output_artifacts"),
    )
    trial_component_name: str
    parameters: dict[str, Any]
    input_artifacts: dict[str, TrialComponentArtifact]
    output_artifacts: dict[str, TrialComponentArtifact]
    metrics: list[SimpleNamespace]
    status: SimpleNamespace | None = None
    start_time: datetime.datetime | None = None
    end_time: datetime.datetime | None = None
    source: SimpleNamespace | None = None

    def __init__(self, session: Session, members: Mapping[str, Any]) -> None:
        self.parameters, self.input_artifacts, self.output_artifacts = {}, {}, {}
        super().__init__(session, members)

    @classmethod
    def create(
        cls,
        trial_component_name: str,
        display_name: str | None = None,
        tags: list[dict[str, str]] | None = None,
        sagemaker_boto_client: object = None,
    ) -> Self:
        """Makes a new one; the client is not asked.

        Raises:
            ConfigError: a rule is broken, or there is one of this name.
        """
        return cls.made(
            None, TrialComponentName=trial_component_name, DisplayName=display_name, Tags=tags
        )

    @classmethod
    def load(cls, trial_component_name: str, sagemaker_boto_client: object = None) -> Self:
        """Returns one that there is.

        Raises:
            UnknownExperimentError: there is none of this name.
        """
        return cls.of(None, trial_component_name)

    @classmethod
    def list(
        cls,
        source_arn: str | None = None,
        created_before: datetime.datetime | None = None,
        created_after: datetime.datetime | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        sagemaker_boto_client: object = None,
        trial_name: str | None = None,
        experiment_name: str | None = None,
        max_results: int | None = None,
        next_token: str | None = None,
    ) -> Iterator[SimpleNamespace]:
        """Yields what there is, the newest first."""
        return cls.all(
            None,
            SourceArn=source_arn,
            TrialName=trial_name,
            ExperimentName=experiment_name,
            **listing(created_before, created_after, sort_by, sort_order, max_results, next_token),
        )

    def list_trials(self) -> Iterator[SimpleNamespace]:
        """Yields the trials that this is a component of."""
        return Trial.all(self._session, TrialComponentName=self.name)

    def delete(self, force_disassociate: bool | None = None) -> None:
        """Forgets this.

        Raises:
            ConfigError: a trial has it, and ``force_disassociate`` is not given.
        """
        if force_disassociate:
            for each in self.list_trials():
                Trial.of(self._session, each.trial_name).remove_trial_component(self)
        super().delete()

    def log_metric(
        self, name: str, value: float, timestamp: datetime.datetime | float, step: int | None
    ) -> None:
        """Adds a number."""
        number = {"MetricName": name, "Value": value, "Timestamp": _document(timestamp)}
        number |= {} if step is None else {"Step": step}
        body = {"TrialComponentName": self.name, "MetricData": [number]}
        self._session.experiments.known["BatchPutMetrics"](body)


def _session(given: object) -> Session:
    return given if isinstance(given, Session) else Session()


def listing(
    created_before: datetime.datetime | None = None,
    created_after: datetime.datetime | None = None,
    sort_by: str | None = None,
    sort_order: str | None = None,
    max_results: int | None = None,
    next_token: str | None = None,
) -> dict[str, Any]:
    """Returns what lists are asked for, as documents have it."""
    return {
        "CreatedBefore": created_before,
        "CreatedAfter": created_after,
        "SortBy": sort_by,
        "SortOrder": sort_order,
        "MaxResults": max_results,
        "NextToken": next_token,
    }


def _check_force(action: str) -> None:
    if action != _FORCE:
        raise ConfigError(f"action must be {_FORCE!r}, since all goes; got {action!r}.")


def _document(value: Any) -> Any:
    """Returns a value of Python as documents have it."""
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    if isinstance(value, TrialComponentArtifact):
        members = {"Value": value.value, "MediaType": value.media_type}
        return {key: each for key, each in members.items() if each is not None}
    if isinstance(value, SimpleNamespace):
        return {to_pascal(key): each for key, each in vars(value).items()}
    if isinstance(value, Mapping):
        return {key: _member(each) for key, each in value.items()}
    return value


def _member(value: Any) -> Any:
    is_artifact = isinstance(value, TrialComponentArtifact)
    return _document(value) if is_artifact else parameter(value)


def _python(key: str, value: Any) -> Any:
    """Returns a value of a document as Python has it, by the member that it is under."""
    if key.endswith("Time"):
        return datetime.datetime.fromtimestamp(value, datetime.UTC)
    if key == "Parameters":
        return {name: next(iter(each.values())) for name, each in value.items()}
    if key.endswith("Artifacts"):
        return {
            name: TrialComponentArtifact(each["Value"], each.get("MediaType"))
            for name, each in value.items()
        }
    if key == "Metrics":
        return [_namespace(each) for each in value]
    return _namespace(value) if isinstance(value, Mapping) else value


def _namespace(members: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{to_snake(key): _python(key, each) for key, each in members.items()})
