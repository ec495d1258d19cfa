"""The metrics of a job as a table.

Source: estimator interface, section 1 (metrics); the public interface of the service's SDK.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.launch.job import metrics
from smdistributed.modelparallel.launch.session import Session

__all__ = ["TrainingJobAnalytics"]


class TrainingJobAnalytics:
    """The numbers that ``metric_definitions`` found in the log of a job, while it runs and after.

    Args:
        training_job_name: of the job.
        metric_names: which to take; None for all.
        sagemaker_session: where jobs live.

    Raises:
        UnknownJobError: there is no such job.
    """

    def __init__(
        self,
        training_job_name: str,
        metric_names: Iterable[str] | None = None,
        sagemaker_session: Session | None = None,
        **_: object,
    ) -> None:
        session = sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        self.name = training_job_name
        self._job = session.job(training_job_name)
        self._names = None if metric_names is None else set(metric_names)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row a number: seconds since the first one, name, value."""
        found = list(metrics.read(self._job.metrics))
        start = found[0]["Timestamp"] if found else 0.0
        return [
            {
                "timestamp": each["Timestamp"] - start,
                "metric_name": each["MetricName"],
                "value": each["Value"],
            }
            for each in found
            if self._names is None or each["MetricName"] in self._names
        ]

    def dataframe(self, force_refresh: bool = False) -> Any:
        """Returns the rows as a table of pandas.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UnsupportedError(
                "a dataframe needs pandas, which is not installed: pip install pandas, or use "
                "rows()."
            ) from None
        return pandas.DataFrame(self.rows(), columns=["timestamp", "metric_name", "value"])
