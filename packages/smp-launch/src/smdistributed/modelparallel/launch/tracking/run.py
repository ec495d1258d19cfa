"""Logs to a component, as the SDK has it: a run of an experiment.

Source: the public interface of the service's SDK.
"""

from __future__ import annotations

import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch import utils
from smdistributed.modelparallel.launch.exceptions import UnknownExperimentError
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tracking.logs import Log
from smdistributed.modelparallel.launch.tracking.records import (
    Experiment,
    Record,
    Trial,
    TrialComponent,
    listing,
)

#: What the SDK calls the trial of all runs, and what tells runs from other components.
_TRIAL = "Default-Run-Group-{}"
_TAG = {"Key": "sagemaker:trial-component-source", "Value": "run"}
_MOST_LETTERS = 59
#: The run whose ``with`` the program is in.
_open: list[Run] = []
R = TypeVar("R", bound=Record)


class Run(Log):
    """A run of an experiment; both are made if they are not there.

    Jobs that start in its ``with`` belong to its trial.

    Args:
        experiment_name: of the experiment, in small letters.
        run_name: of the run, in small letters; default a new one.
        experiment_display_name: what people call the experiment.
        run_display_name: what people call the run.
        tags: of what is made.
        sagemaker_session: where experiments live.
        artifact_bucket: where files go; default the session's.
        artifact_prefix: what their keys begin with.

    Raises:
        ConfigError: a name breaks a rule.
    """

    def __init__(
        self,
        experiment_name: str,
        run_name: str | None = None,
        experiment_display_name: str | None = None,
        run_display_name: str | None = None,
        tags: list[dict[str, str]] | None = None,
        sagemaker_session: Session | None = None,
        artifact_bucket: str | None = None,
        artifact_prefix: str | None = None,
    ) -> None:
        session = sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        self.experiment_name = experiment_name.lower()
        self.run_name = (run_name or utils.unique_name_from_base("sagemaker-run")).lower()
        for word, name in (("experiment", self.experiment_name), ("run", self.run_name)):
            if len(name) > _MOST_LETTERS:
                raise ConfigError(
                    f"{word}_name has at most {_MOST_LETTERS} letters; got {name!r}: shorten it."
                )
        self.run_group_name = _TRIAL.format(self.experiment_name)
        asked: dict[str, Any] = {"ExperimentName": self.experiment_name, "Tags": tags}
        shown = {"DisplayName": experiment_display_name}
        _kept(Experiment, session, self.experiment_name, **asked, **shown)
        trial = _kept(Trial, session, self.run_group_name, **asked, TrialName=self.run_group_name)
        name = f"{self.experiment_name}-{self.run_name}"
        component = _kept(
            TrialComponent,
            session,
            name,
            TrialComponentName=name,
            DisplayName=run_display_name,
            Tags=[*(tags or ()), _TAG],
        )
        trial.add_trial_component(component)
        super().__init__(component, session, artifact_bucket, artifact_prefix)

    @property
    def experiment_config(self) -> dict[str, str]:
        """What ``fit`` is given so that a job belongs to this."""
        return {
            "ExperimentName": self.experiment_name,
            "TrialName": self.run_group_name,
            "RunName": self._component.name,
        }

    def log_artifact(
        self, name: str, value: str, media_type: str | None = None, is_output: bool = True
    ) -> None:
        """Logs where something lies that was made, or read."""
        self._address(name, value, media_type, is_output)

    def log_file(
        self,
        file_path: str,
        name: str | None = None,
        media_type: str | None = None,
        is_output: bool = True,
        extra_args: object = None,
    ) -> None:
        """Uploads a file, and logs it as made, or read; ``extra_args`` are not looked at."""
        self._file(file_path, name, media_type, is_output)

    def log_metric(
        self,
        name: str,
        value: float,
        timestamp: datetime.datetime | float | None = None,
        step: int | None = None,
    ) -> None:
        """Logs a number, at once."""
        self._number(name, value, timestamp, step)

    def __enter__(self) -> Self:
        if _open and _open[-1] is not self:
            raise ConfigError(
                f"one run is open at a time; {_open[-1].run_name!r} is, and {self.run_name!r} was "
                "to be: end its with first."
            )
        _open.append(self)
        return super().__enter__() if len(_open) == 1 else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _open.pop()
        if not _open:
            super().__exit__(kind, error, trace)


def load_run(
    run_name: str | None = None,
    experiment_name: str | None = None,
    sagemaker_session: Session | None = None,
    artifact_bucket: str | None = None,
    artifact_prefix: str | None = None,
    tags: list[dict[str, str]] | None = None,
) -> Run:
    """Returns a run by its names, or the one whose ``with`` the program is in.

    Raises:
        ConfigError: there is none, or one of the names is missing.
    """
    if run_name and experiment_name:
        return Run(
            experiment_name,
            run_name,
            tags=tags,
            sagemaker_session=sagemaker_session,
            artifact_bucket=artifact_bucket,
            artifact_prefix=artifact_prefix,
        )
    if run_name or not _open:
        raise ConfigError(
            "load_run needs run_name and experiment_name, or to be called in the with of a Run; "
            f"got {run_name!r} and {experiment_name!r}: give both. In the script of a job no run "
            "is open."
        )
    return _open[-1]


def list_runs(
    experiment_name: str,
    created_before: datetime.datetime | None = None,
    created_after: datetime.datetime | None = None,
    sagemaker_session: Session | None = None,
    max_results: int | None = None,
    next_token: str | None = None,
    sort_by: str | None = None,
    sort_order: str | None = None,
) -> list[Run]:
    """Returns the runs of an experiment, the newest first."""
    session = sagemaker_session if isinstance(sagemaker_session, Session) else Session()
    asked = listing(created_before, created_after, sort_by, sort_order, max_results, next_token)
    components = TrialComponent.all(session, ExperimentName=experiment_name.lower(), **asked)
    before = f"{experiment_name.lower()}-"
    return [
        Run(
            experiment_name,
            each.trial_component_name.removeprefix(before),
            sagemaker_session=session,
        )
        for each in components
        if _TAG in (session.experiments.tags(each.trial_component_arn) or ())
    ]


def current_config() -> dict[str, str] | None:
    """Returns what jobs belong to that start now: the run whose ``with`` the program is in."""
    return _open[-1].experiment_config if _open else None


def _kept(kind: type[R], session: Session, name: str, **members: Any) -> R:
    """Returns what there is under a name; makes it if there is none."""
    try:
        return kind.of(session, name)
    except UnknownExperimentError:
        return kind.made(session, **members)
