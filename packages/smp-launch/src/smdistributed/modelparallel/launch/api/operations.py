"""The operations of the service: those of ``fit``, ``attach`` and logs, over folders of jobs.

Source: the public schemas of the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.launch.api.hosting import Hosting
from smdistributed.modelparallel.launch.exceptions import (
    UnknownEndpointError,
    UnknownExperimentError,
    UnknownJobError,
)
from smdistributed.modelparallel.launch.job import folder
from smdistributed.modelparallel.launch.job.contract import host_names
from smdistributed.modelparallel.launch.request import naming
from smdistributed.modelparallel.launch.session import Session

_JOB = "training-job"
_MOST_BYTES = 1 << 20
Answer = tuple[int, dict[str, Any]]


class Operations:
    """Answers requests."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": self._describe,
            "StopTrainingJob": self._stop,
            "ListTrainingJobs": self._list,
            "ListTags": self._tags,
            "DescribeLogStreams": self._streams,
            "GetLogEvents": self._events,
            **Hosting(session).known,
            **session.experiments.known,
        }

    def answer(self, name: str, body: dict[str, Any]) -> Answer:
        """Returns the status of HTTP and the answer to an operation."""
        operation = self._known.get(name)
        if operation is None:
            return _error(f"smp-launch does not offer {name}; it has {', '.join(self._known)}.")
        try:
            return 200, operation(body)
        except UnknownJobError:
            return _error("Requested resource not found.")
        except UnknownExperimentError as error:
            return _error(str(error), "ResourceNotFound")
        except UnknownEndpointError as error:
            return _error(f"Could not find what was asked for: {error}")
        except (SMPError, KeyError) as error:
            return _error(str(error))

    def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"TrainingJobArn": naming.arn(_JOB, self._session.start(body).name)}

    def _describe(self, body: dict[str, Any]) -> dict[str, Any]:
        found = self._session.describe_training_job(body["TrainingJobName"])
        found.pop("Backend", None)
        found.pop("ExitCode", None)
        # The service always answers with this key, and attach reads it.
        found["OutputDataConfig"].setdefault("KmsKeyId", "")
        return {**found, "TrainingJobArn": naming.arn(_JOB, body["TrainingJobName"])}

    def _stop(self, body: dict[str, Any]) -> dict[str, Any]:
        self._session.stop_training_job(body["TrainingJobName"])
        return {}

    def _list(self, body: dict[str, Any]) -> dict[str, Any]:
        part = body.get("NameContains", "")
        jobs = [job for job in folder.all_jobs(self._session.root) if part in job.name]
        summaries = []
        for job in jobs[: body.get("MaxResults", 100)]:
            status = self._session.observe(job)
            summaries.append(
                {
                    "TrainingJobName": job.name,
                    "TrainingJobArn": naming.arn(_JOB, job.name),
                    "CreationTime": status.creation_time,
                    "TrainingJobStatus": status.training_job_status,
                }
            )
        return {"TrainingJobSummaries": summaries}

    def _tags(self, body: dict[str, Any]) -> dict[str, Any]:
        found = self._session.experiments.tags(body["ResourceArn"])
        if found is not None:
            return {"Tags": found}
        job = self._session.job(body["ResourceArn"].rpartition("/")[2])
        return {"Tags": job.request().as_json().get("Tags", [])}

    def _streams(self, body: dict[str, Any]) -> dict[str, Any]:
        job = self._session.job(body["logStreamNamePrefix"].partition("/")[0])
        found = {path.stem for path in job.logs.glob("algo-*.log")}
        # Clients wait for one of each host, and all may print into the first one's.
        hosts = host_names(job.request().resource_config.instance_count) if found else ()
        names = sorted(found.union(hosts))
        return {"logStreams": [{"logStreamName": f"{job.name}/{name}"} for name in names]}

    def _events(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns whole lines from where the token points to; all have one time, the job's."""
        name, _, host = body["logStreamName"].partition("/")
        job = self._session.job(name)
        logs = {path.stem: path for path in job.logs.glob("algo-*.log")}
        token = body.get("nextToken", "f/0")
        start = int(token.rpartition("/")[2])
        data = b""
        if host in logs:
            with logs[host].open("rb") as log:
                log.seek(start)
                data = log.read(_MOST_BYTES)
        if not job.status().is_final:
            data = data[: data.rfind(b"\n") + 1]
        lines = data.decode(errors="replace").splitlines()
        at = int(job.status().creation_time * 1000)
        return {
            "events": [{"timestamp": at, "message": line or " "} for line in lines],
            "nextForwardToken": f"f/{start + len(data)}",
            "nextBackwardToken": "b/0",
        }


def _error(message: str, kind: str = "ValidationException") -> Answer:
    return 400, {"__type": kind, "message": message}
