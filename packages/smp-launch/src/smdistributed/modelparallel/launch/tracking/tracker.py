"""Logs to a component, as ``smexperiments`` has it.

Source: the public interface of the library ``smexperiments``.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Self

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch import utils
from smdistributed.modelparallel.launch.request import naming
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tracking.logs import Log
from smdistributed.modelparallel.launch.tracking.records import TrialComponent


class Tracker(Log):
    """Logs to a component; ``create`` and ``load`` make one.

    Attributes:
        trial_component: to which it logs.
    """

    @property
    def trial_component(self) -> TrialComponent:
        """To which it logs."""
        return self._component

    @classmethod
    def create(
        cls,
        base_trial_component_name: str = "TrialComponent",
        display_name: str | None = None,
        artifact_bucket: str | None = None,
        artifact_prefix: str | None = None,
        boto3_session: object = None,
        sagemaker_boto_client: object = None,
    ) -> Self:
        """Makes a component, which no trial has yet; files go to the default bucket."""
        name = utils.unique_name_from_base(base_trial_component_name)
        component = TrialComponent.create(name, display_name)
        return cls(component, Session(), artifact_bucket, artifact_prefix)

    @classmethod
    def load(
        cls,
        trial_component_name: str | None = None,
        artifact_bucket: str | None = None,
        artifact_prefix: str | None = None,
        boto3_session: object = None,
        sagemaker_boto_client: object = None,
        training_job_name: str | None = None,
        processing_job_name: str | None = None,
    ) -> Self:
        """Returns a tracker of a component that there is, by its name or that of its job.

        Raises:
            ConfigError: neither is given, or the job has none, since it belongs to no trial.
            UnknownExperimentError: there is no component of this name.
        """
        if training_job_name:
            address = naming.arn("training-job", training_job_name)
            found = [each.trial_component_name for each in TrialComponent.list(address)]
            trial_component_name = next(iter(found), None)
        if trial_component_name is None:
            raise ConfigError(
                "a tracker needs trial_component_name, or training_job_name of a job that belongs "
                f"to a trial; got {training_job_name!r}: give fit an experiment_config."
            )
        component = TrialComponent.load(trial_component_name)
        return cls(component, Session(), artifact_bucket, artifact_prefix)

    def log_input(self, name: str, value: str, media_type: str | None = None) -> None:
        """Logs where something lies that was read."""
        self._address(name, value, media_type, is_output=False)

    def log_output(self, name: str, value: str, media_type: str | None = None) -> None:
        """Logs where something lies that was made."""
        self._address(name, value, media_type, is_output=True)

    def log_input_artifact(
        self, file_path: str, name: str | None = None, media_type: str | None = None
    ) -> None:
        """Uploads a file, and logs it as read."""
        self._file(file_path, name, media_type, is_output=False)

    def log_output_artifact(
        self, file_path: str, name: str | None = None, media_type: str | None = None
    ) -> None:
        """Uploads a file, and logs it as made."""
        self._file(file_path, name, media_type, is_output=True)

    log_artifact = log_output_artifact

    def log_artifacts(self, directory: str, media_type: str | None = None) -> None:
        """Uploads the files of a folder, and logs them as made."""
        for path in sorted(Path(directory).iterdir()):
            if path.is_file():
                self._file(str(path), None, media_type, is_output=True)

    def log_metric(
        self,
        metric_name: str,
        value: float,
        timestamp: datetime.datetime | float | None = None,
        iteration_number: int | None = None,
    ) -> None:
        """Logs a number, at once."""
        self._number(metric_name, value, timestamp, iteration_number)
