"""The metrics of a job, and what was logged in an experiment, as tables.

Source: estimator interface, section 1 (metrics); the public interface of the service's SDK.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.job import metrics
from smdistributed.modelparallel.launch.session import Session

__all__ = ["ExperimentAnalytics", "TrainingJobAnalytics"]

_STATISTICS = ("Min", "Max", "Avg", "StdDev", "Last", "Count")


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
        return _table(self.rows(), ["timestamp", "metric_name", "value"])


class ExperimentAnalytics:
    """What was logged in the trials of an experiment.

    Args:
        experiment_name: of the experiment.
        search_expression: which components to take, as the service has it.
        sort_by: a member of components.
        sort_order: ``Ascending`` or ``Descending``.
        metric_names: which to take; None for all, as below.
        parameter_names: which to take.
        sagemaker_session: where experiments live.
        input_artifact_names: which to take.
        output_artifact_names: which to take.

    Raises:
        ConfigError: neither an experiment nor an expression is given.
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        search_expression: Mapping[str, Any] | None = None,
        sort_by: str | None = None,
        sort_order: str | None = None,
        metric_names: Iterable[str] | None = None,
        parameter_names: Iterable[str] | None = None,
        sagemaker_session: Session | None = None,
        input_artifact_names: Iterable[str] | None = None,
        output_artifact_names: Iterable[str] | None = None,
    ) -> None:
        if not (experiment_name or search_expression):
            raise ConfigError("ExperimentAnalytics needs experiment_name or search_expression.")
        session = sagemaker_session if isinstance(sagemaker_session, Session) else Session()
        self.name = experiment_name
        self._known = session.experiments.known
        expression = dict(search_expression or {})
        if experiment_name:
            of = {"Name": "Parents.ExperimentName", "Operator": "Equals", "Value": experiment_name}
            expression["Filters"] = [*expression.get("Filters", ()), of]
        self._asked: dict[str, Any] = {
            "Resource": "ExperimentTrialComponent",
            "SearchExpression": expression,
        }
        orders = {"SortBy": sort_by, "SortOrder": sort_order}
        self._asked |= {key: value for key, value in orders.items() if value}
        self._names = {
            "Parameters": parameter_names,
            "Metrics": metric_names,
            "InputArtifacts": input_artifact_names,
            "OutputArtifacts": output_artifact_names,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row a component: its names, parameters, numbers and addresses, its trials."""
        found = self._known["Search"](self._asked)["Results"]
        return [self._row(each["TrialComponent"]) for each in found]

    def dataframe(self, force_refresh: bool = False) -> Any:
        """Returns the rows as a table of pandas.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        return _table(self.rows())

    def _row(self, component: Mapping[str, Any]) -> dict[str, Any]:
        row = {key: component[key] for key in ("TrialComponentName", "DisplayName")}
        if "Source" in component:
            row["SourceArn"] = component["Source"]["SourceArn"]
        for name, value in sorted(component.get("Parameters", {}).items()):
            if self._is_taken("Parameters", name):
                row[name] = next(iter(value.values()))
        for each in component["Metrics"]:
            if self._is_taken("Metrics", each["MetricName"]):
                row |= {f"{each['MetricName']} - {what}": each[what] for what in _STATISTICS}
        for kind in ("InputArtifacts", "OutputArtifacts"):
            for name, value in sorted(component.get(kind, {}).items()):
                if self._is_taken(kind, name):
                    row |= {f"{name} - {what}": value.get(what) for what in ("MediaType", "Value")}
        row["Trials"] = [parent["TrialName"] for parent in component["Parents"]]
        row["Experiments"] = [parent["ExperimentName"] for parent in component["Parents"]]
        return row

    def _is_taken(self, kind: str, name: str) -> bool:
        names = self._names[kind]
        return names is None or name in names


def _table(rows: list[dict[str, Any]], columns: list[str] | None = None) -> Any:
    try:
        import pandas
    except ImportError:
        raise UnsupportedError(
            "a dataframe needs pandas, which is not installed: pip install pandas, or use rows()."
        ) from None
    return pandas.DataFrame(rows, columns=columns)
