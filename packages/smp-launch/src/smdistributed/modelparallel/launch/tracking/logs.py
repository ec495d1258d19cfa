"""What is logged to a component, by a tracker or a run."""

from __future__ import annotations

import datetime
import math
import mimetypes
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tracking.records import (
    TrialComponent,
    TrialComponentArtifact,
)

_PREFIX = "trial-component-artifacts"


class Log:
    """Logs to a component; ``with`` says when it began, when it ended and how."""

    def __init__(
        self,
        component: TrialComponent,
        session: Session,
        artifact_bucket: str | None,
        artifact_prefix: str | None,
    ) -> None:
        self._component = component
        self._uploads = session
        self._bucket = artifact_bucket
        self._prefix = artifact_prefix or _PREFIX

    def log_parameter(self, name: str, value: str | float) -> None:
        """Logs a number or a text, in place of one that has the same name."""
        if not _is_odd(name, value):
            self._component.parameters[name] = value

    def log_parameters(self, parameters: Mapping[str, str | float]) -> None:
        """Logs numbers and texts, in place of those that have the same names."""
        for name, value in parameters.items():
            self.log_parameter(name, value)

    def log_table(self, *_: object, **__: object) -> None:
        """Is not offered, as all that is drawn.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"tables and curves are not offered by {type(self).__name__}: write a file, and log it."
        )

    log_confusion_matrix = log_precision_recall = log_roc_curve = log_table

    def close(self) -> None:
        """Keeps what was logged."""
        self._component.save()

    def __enter__(self) -> Self:
        component = self._component
        component.start_time = component.start_time or _now()
        component.status = SimpleNamespace(primary_status="InProgress")
        component.save()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._component.end_time = _now()
        status = SimpleNamespace(primary_status="Completed")
        if error is not None:
            status = SimpleNamespace(primary_status="Failed", message=str(error))
        self._component.status = status
        self.close()

    def _number(
        self, name: str, value: float, timestamp: datetime.datetime | float | None, step: int | None
    ) -> None:
        if not _is_odd(name, value):
            self._component.log_metric(name, float(value), timestamp or _now(), step)

    def _address(self, name: str, value: str, media_type: str | None, is_output: bool) -> None:
        component = self._component
        kept = component.output_artifacts if is_output else component.input_artifacts
        kept[name] = TrialComponentArtifact(value, media_type)

    def _file(
        self, file_path: str, name: str | None, media_type: str | None, is_output: bool
    ) -> None:
        prefix = f"{self._prefix}/{self._component.name}"
        address = self._uploads.upload_data(file_path, self._bucket, prefix)
        guessed = media_type or mimetypes.guess_type(file_path)[0]
        self._address(name or Path(file_path).name, address, guessed, is_output)


def _is_odd(name: str, value: Any) -> bool:
    """Returns whether a value has no form in a document; says so."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    if is_odd:
        warnings.warn(f"{name} is not logged, since it is {value}.", stacklevel=3)
    return is_odd


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
