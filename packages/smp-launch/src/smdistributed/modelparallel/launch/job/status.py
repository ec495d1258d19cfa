"""How a job stands: what ``DescribeTrainingJob`` says beyond the request.

Source: estimator interface, section 2 (states); the public schema of ``DescribeTrainingJob``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_pascal

State = Literal["InProgress", "Stopping", "Completed", "Failed", "Stopped"]
Phase = Literal[
    "Starting",
    "Pending",
    "Downloading",
    "Training",
    "Uploading",
    "Stopping",
    "Completed",
    "Failed",
    "Stopped",
    "MaxRuntimeExceeded",
    "Interrupted",
]
#: States that a job does not leave.
FINAL: tuple[State, ...] = ("Completed", "Failed", "Stopped")


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_pascal, populate_by_name=True, frozen=True)


class Transition(_Part):
    """A phase that the job went through; times are seconds since 1970."""

    status: Phase
    start_time: float
    end_time: float | None = None
    status_message: str = ""


class Artifacts(_Part):
    """Where results are."""

    s3_model_artifacts: str


class Status(_Part):
    """How a job stands."""

    training_job_status: State = "InProgress"
    secondary_status: Phase = "Starting"
    secondary_status_transitions: tuple[Transition, ...] = ()
    creation_time: float
    training_start_time: float | None = None
    training_end_time: float | None = None
    last_modified_time: float
    failure_reason: str | None = None
    exit_code: int | None = None
    model_artifacts: Artifacts | None = None
    final_metric_data_list: tuple[dict[str, Any], ...] = ()
    backend: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Whether nothing will change any more."""
        return self.training_job_status in FINAL

    def entering(self, phase: Phase, message: str = "", **changes: Any) -> Status:
        """Returns the status after a change of phase."""
        now = time.time()
        passed = [
            each if each.end_time else each.model_copy(update={"end_time": now})
            for each in self.secondary_status_transitions
        ]
        entered = Transition(status=phase, start_time=now, status_message=message)
        if changes.get("training_job_status") in FINAL:
            entered = entered.model_copy(update={"end_time": now})
        return self.model_copy(
            update={
                "secondary_status": phase,
                "secondary_status_transitions": (*passed, entered),
                "last_modified_time": now,
                **changes,
            }
        )

    def waiting(self, message: str) -> Status:
        """Returns the status of a job that a scheduler has not started yet; for readers alone."""
        phase = Transition(
            status="Pending", start_time=self.last_modified_time, status_message=message
        )
        return self.model_copy(
            update={
                "secondary_status": "Pending",
                "secondary_status_transitions": (*self.secondary_status_transitions, phase),
            }
        )

    def failed(self, reason: str, exit_code: int | None = None) -> Status:
        """Returns the status of a job that failed."""
        return self.entering(
            "Failed",
            reason.partition("\n")[0],
            training_job_status="Failed",
            failure_reason=reason,
            exit_code=exit_code,
            training_end_time=time.time(),
        )


def of_rules(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns how the rules of a debugger stand that a document has: nobody evaluates them."""
    return [
        {
            "RuleConfigurationName": rule.get("RuleConfigurationName", ""),
            "RuleEvaluationStatus": "Stopped",
            "StatusDetails": "Rules are not evaluated on this machine: no debugger runs here.",
        }
        for rule in request.get("DebugRuleConfigurations", ())
    ]


def new(backend: dict[str, Any]) -> Status:
    """Returns the status of a job that is about to start."""
    now = time.time()
    status = Status(creation_time=now, last_modified_time=now, backend=backend)
    return status.entering("Starting", "Starting the supervisor of the job")
