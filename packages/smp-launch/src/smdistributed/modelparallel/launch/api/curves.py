"""The numbers of jobs, where the SDK looks for them: among the metrics of moto."""

from __future__ import annotations

import datetime
from pathlib import Path

from moto.cloudwatch.models import MetricDatum, cloudwatch_backends

from smdistributed.modelparallel.launch.job import folder, metrics
from smdistributed.modelparallel.launch.request.naming import ACCOUNT

_NAMESPACE = "/aws/sagemaker/TrainingJobs"


def bring(root: Path, region: str) -> None:
    """Brings the numbers of all jobs up to date."""
    backend = cloudwatch_backends[ACCOUNT][region]
    others = [each for each in backend.metric_data if each.namespace != _NAMESPACE]
    found = [
        _datum(job.name, each)
        for job in folder.all_jobs(root)
        for each in metrics.read(job.metrics)
    ]
    # At once: requests are answered side by side.
    backend.metric_data = [*others, *found]


def _datum(job: str, number: metrics.Record) -> MetricDatum:
    at = datetime.datetime.fromtimestamp(number["Timestamp"], datetime.UTC)
    return MetricDatum(
        namespace=_NAMESPACE,
        name=number["MetricName"],
        value=number["Value"],
        dimensions=[{"Name": "TrainingJobName", "Value": job}],
        timestamp=at.replace(tzinfo=None),  # as moto compares it
    )
