"""What a job tells about itself, as a component of a trial: read when it is asked for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.launch.job import metrics
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.request import hyperparameters as names


def told(job: JobFolder, status: Status) -> dict[str, Any]:
    """Returns the members of a component that a job has."""
    request = job.request()
    values = names.of_script(names.decode(request.hyper_parameters))
    message = (status.failure_reason or status.secondary_status).partition("\n")[0]
    found: dict[str, Any] = {
        "Status": {"PrimaryStatus": status.training_job_status, "Message": message},
        "StartTime": status.creation_time,
        "Parameters": {name: parameter(value) for name, value in values.items()},
        "InputArtifacts": {
            channel.channel_name: {"Value": channel.data_source.address}
            for channel in request.input_data_config
        },
        "OutputArtifacts": {},
    }
    if status.training_end_time:
        found["EndTime"] = status.training_end_time
    if status.model_artifacts:
        address = status.model_artifacts.s3_model_artifacts
        found["OutputArtifacts"] = {"SageMaker.ModelArtifact": {"Value": address}}
    return found


def parameter(value: object) -> dict[str, Any]:
    """Returns a value as documents have it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"NumberValue": float(value)}
    return {"StringValue": str(value)}


def summaries(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns what numbers were, by name."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        for each in metrics.read(file):
            series.setdefault(each["MetricName"], []).append(each)
    return [_summary(name, found) for name, found in series.items()]


def _summary(name: str, found: list[Mapping[str, Any]]) -> dict[str, Any]:
    values = [each["Value"] for each in found]
    return {
        "MetricName": name,
        "TimeStamp": found[-1]["Timestamp"],
        "Min": min(values),
        "Max": max(values),
        "Avg": statistics.fmean(values),
        "StdDev": statistics.pstdev(values),
        "Last": values[-1],
        "Count": len(values),
    }
