"""The operations on experiments, by the names that the service has for them.

Both doors come here: the SDK by requests, the names of the SDK by calls.

Source: the public schemas of the operations.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.exceptions import UnknownExperimentError
from smdistributed.modelparallel.launch.experiments import jobs
from smdistributed.modelparallel.launch.experiments.records import (
    COMPONENT,
    EXPERIMENT,
    KINDS,
    TRIAL,
    Kind,
    Record,
    Records,
)
from smdistributed.modelparallel.launch.experiments.search import matches
from smdistributed.modelparallel.launch.job import metrics
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.request import naming
from smdistributed.modelparallel.launch.request.document import ExperimentConfig, validated
from smdistributed.modelparallel.launch.request.experiments import Numbers
from smdistributed.modelparallel.launch.storage.places import make_private

Document = dict[str, Any]
#: The trials of a component, in its record.
_TRIALS = "Trials"
_OF_JOBS = "-aws-training-job"
#: Members in which what was logged adds to what the job has.
_MERGED = ("Parameters", "InputArtifacts", "OutputArtifacts")
#: Members of a list that say which records are in it.
_SELECTING = ("ExperimentName", "TrialName", "TrialComponentName", "SourceArn")


class Experiments:
    """The experiments of a folder of jobs.

    Attributes:
        known: the operations, each from the body of a request to that of its answer.
    """

    def __init__(self, root: Path, observe: Callable[[JobFolder], Status]) -> None:
        self._root = root
        self._observe = observe
        self._records = Records(root)
        verbs = {
            "Create": self._create,
            "Describe": self._describe,
            "Update": self._update,
            "Delete": self._delete,
        }
        self.known: dict[str, Callable[[Document], Document]] = {
            f"{verb}{kind.name}": functools.partial(run, kind)
            for kind in KINDS
            for verb, run in verbs.items()
        }
        for kind in KINDS:
            self.known[f"List{kind.name}s"] = functools.partial(self._list, kind)
        self.known["AssociateTrialComponent"] = self._associate
        self.known["DisassociateTrialComponent"] = self._disassociate
        self.known["Search"] = self._search
        self.known["BatchPutMetrics"] = self._put_numbers

    def tags(self, address: str) -> list[dict[str, str]] | None:
        """Returns the tags of what has an address; None if it is none of these."""
        resource, _, name = address.rpartition(":")[2].partition("/")
        for kind in KINDS:
            if kind.resource == resource:
                return list(self._records.read(kind, name).get("Tags", ()))
        return None

    def check(self, config: ExperimentConfig | None) -> None:
        """Checks what a job says it belongs to.

        Raises:
            ConfigError: the trial is of another experiment.
            UnknownExperimentError: there is no such experiment or trial.
        """
        if config is None:
            return
        if config.experiment_name:
            self._records.read(EXPERIMENT, config.experiment_name)
        if config.trial_name:
            of = self._records.read(TRIAL, config.trial_name)["ExperimentName"]
            if config.experiment_name not in (None, of):
                raise ConfigError(
                    f"TrialName must be a trial of ExperimentName; got {config.trial_name!r}, of "
                    f"{of!r}, with {config.experiment_name!r}: correct one of them."
                )

    def add_job(self, job: JobFolder, config: ExperimentConfig | None) -> None:
        """Makes a job a component of the trial that it names, or of a new one."""
        if config is None or not (config.trial_name or config.experiment_name):
            return
        trial = config.trial_name
        if trial is None:
            trial = f"{job.name}-trial"
            asked = {"TrialName": trial, "ExperimentName": config.experiment_name}
            self._create(TRIAL, asked)
        name = job.name.lower() + _OF_JOBS
        asked = {"TrialComponentName": name}
        if config.trial_component_display_name:
            asked["DisplayName"] = config.trial_component_display_name
        source = {
            "SourceArn": naming.arn("training-job", job.name),
            "SourceType": "SageMakerTrainingJob",
        }
        self._create(COMPONENT, asked, Source=source)
        self._associate({"TrialName": trial, "TrialComponentName": name})

    def _create(self, kind: Kind, body: Document, **more: Any) -> Document:
        made = validated(kind.form, body).as_json()
        name, now = made[kind.key], time.time()
        with self._records.changing():
            if self._records.has(kind, name):
                # The SDK goes on where it reads these words.
                raise ConfigError(
                    f"each {kind.word} has a name of its own; {name!r} already exists: choose "
                    "another, or load it."
                )
            if kind is TRIAL:
                self._records.read(EXPERIMENT, made["ExperimentName"])
            stamps = {"CreationTime": now, "LastModifiedTime": now}
            self._records.write(kind, {"DisplayName": name, **made, **stamps, **more})
        return _addressed(kind, name)

    def _describe(self, kind: Kind, body: Document) -> Document:
        found = self._told(kind, self._records.read(kind, _named(kind, body)))
        return {key: value for key, value in found.items() if key not in ("Tags", "Parents")}

    def _update(self, kind: Kind, body: Document) -> Document:
        name = _named(kind, body)
        with self._records.changing():
            record = self._records.read(kind, name)
            members = {field.alias for field in kind.form.model_fields.values()}
            given = {key: body[key] for key in body if not key.endswith("ToRemove")}
            made = {key: value for key, value in record.items() if key in members}
            made = validated(kind.form, {**made, **given}).as_json()
            for key in body.keys() - given.keys():
                for each in body[key]:
                    made.get(key.removesuffix("ToRemove"), {}).pop(each, None)
            self._records.write(kind, {**record, **made, "LastModifiedTime": time.time()})
        return _addressed(kind, name)

    def _delete(self, kind: Kind, body: Document) -> Document:
        name = _named(kind, body)
        with self._records.changing():
            record = self._records.read(kind, name)
            if kind is EXPERIMENT:
                inside = [each for each in self._records.all(TRIAL) if each[kind.key] == name]
                left = [each[TRIAL.key] for each in inside]
            elif kind is TRIAL:
                inside = [each for each in self._records.all(COMPONENT) if name in _trials(each)]
                left = [each[COMPONENT.key] for each in inside]
            else:
                left = _trials(record)
            if left:
                raise ConfigError(
                    f"what has trials, components or parents is not deleted; {kind.word} {name!r} "
                    f"has {', '.join(left)}: delete these, or take components out, first."
                )
            self._records.remove(kind, name)
        return _addressed(kind, name)

    def _list(self, kind: Kind, body: Document) -> Document:
        for other in KINDS:
            if other.key in body:
                self._records.read(other, body[other.key])
        found = []
        for record in self._records.all(kind):
            told = self._told(kind, record)
            if self._is_selected(kind, told, body):
                found.append(told)
        part, more = _page(_sorted(kind, found, body, "CreationTime"), body)
        return {f"{kind.name}Summaries": [_summary(kind, each) for each in part], **more}

    def _is_selected(self, kind: Kind, told: Document, body: Document) -> bool:
        for key in _SELECTING:
            if key in body and body[key] not in self._values(kind, told, key):
                return False
        after, before = body.get("CreatedAfter", 0.0), body.get("CreatedBefore", float("inf"))
        return bool(after <= told["CreationTime"] <= before)

    def _values(self, kind: Kind, told: Document, key: str) -> list[str]:
        """Returns what a document says under a member by which lists are chosen."""
        if key == "SourceArn":
            return [told.get("Source", {}).get(key, "")]
        if kind is COMPONENT and key != kind.key:
            return [parent[key] for parent in told["Parents"]]
        if kind is TRIAL and key == COMPONENT.key:
            components = self._records.all(COMPONENT)
            return [each[key] for each in components if told[kind.key] in _trials(each)]
        return [told[key]] if key in told else []

    def _associate(self, body: Document) -> Document:
        trial, name = _named(TRIAL, body), _named(COMPONENT, body)
        with self._records.changing():
            self._records.read(TRIAL, trial)
            record = self._records.read(COMPONENT, name)
            record[_TRIALS] = sorted({*_trials(record), trial})
            self._records.write(COMPONENT, record)
        return {**_addressed(TRIAL, trial), **_addressed(COMPONENT, name)}

    def _disassociate(self, body: Document) -> Document:
        trial, name = _named(TRIAL, body), _named(COMPONENT, body)
        with self._records.changing():
            record = self._records.read(COMPONENT, name)
            record[_TRIALS] = [each for each in _trials(record) if each != trial]
            self._records.write(COMPONENT, record)
        return {**_addressed(TRIAL, trial), **_addressed(COMPONENT, name)}

    def _search(self, body: Document) -> Document:
        kinds = {"".join(word.title() for word in kind.resource.split("-")): kind for kind in KINDS}
        kind = kinds.get(body["Resource"])
        if kind is None:
            raise UnsupportedError(
                f"a search for {body['Resource']} is not offered, but for {', '.join(kinds)}: list "
                "them, and choose."
            )
        told = [self._told(kind, record) for record in self._records.all(kind)]
        found = [each for each in told if matches(body.get("SearchExpression", {}), each)]
        part, more = _page(_sorted(kind, found, body, "LastModifiedTime"), body)
        return {"Results": [{kind.name: each} for each in part], **more}

    def _put_numbers(self, body: Document) -> Document:
        numbers = validated(Numbers, body)
        with self._records.changing():
            self._records.read(COMPONENT, numbers.trial_component_name)
            file = self._records.numbers(numbers.trial_component_name)
            make_private(file.parent)
            metrics.write(file, [each.as_json() for each in numbers.metric_data])
        return {"Errors": []}

    def _told(self, kind: Kind, record: Record) -> Document:
        """Returns a record as the service describes it."""
        name = record[kind.key]
        found = {key: value for key, value in record.items() if key != _TRIALS}
        found |= _addressed(kind, name)
        if kind is not COMPONENT:
            return found
        files = [self._records.numbers(name)]
        if job := self._job_of(record):
            of_job = jobs.told(job, self._observe(job))
            merged = {key: {**of_job[key], **record.get(key, {})} for key in _MERGED}
            found |= of_job | merged
            files.append(job.metrics)
        return {**found, "Metrics": jobs.summaries(files), "Parents": list(self._parents(record))}

    def _job_of(self, record: Record) -> JobFolder | None:
        """Returns the job that a component is, if it is one and is there still."""
        name = record.get("Source", {}).get("SourceArn", "").rpartition("/")[2]
        folder = JobFolder(self._root / name)
        return folder if name and (folder.path / "status.json").is_file() else None

    def _parents(self, record: Record) -> Iterator[dict[str, str]]:
        for trial in _trials(record):
            of = self._records.read(TRIAL, trial)["ExperimentName"]
            yield {"TrialName": trial, "ExperimentName": of}


def _trials(record: Record) -> list[str]:
    return list(record.get(_TRIALS, ()))


def _named(kind: Kind, body: Mapping[str, Any]) -> str:
    name = body.get(kind.key)
    if not isinstance(name, str):
        raise UnknownExperimentError(f"{kind.key} must be the name of a {kind.word}; got {name!r}.")
    return name


def _addressed(kind: Kind, name: str) -> Document:
    return {f"{kind.name}Arn": naming.arn(kind.resource, name)}


def _summary(kind: Kind, told: Document) -> Document:
    """Returns what a list has of a record."""
    keys = (kind.key, f"{kind.name}Arn", "DisplayName", "CreationTime", "LastModifiedTime")
    more = ("Status", "StartTime", "EndTime") if kind is COMPONENT else ()
    found = {key: told[key] for key in (*keys, *more) if key in told}
    return found | ({f"{kind.name}Source": told["Source"]} if "Source" in told else {})


def _sorted(kind: Kind, found: list[Document], body: Document, usual: str) -> list[Document]:
    key = body.get("SortBy", usual)
    key = kind.key if key == "Name" else key
    is_downwards = body.get("SortOrder", "Descending") == "Descending"
    present = [each for each in found if isinstance(each.get(key), str | int | float)]
    rest = [each for each in found if not isinstance(each.get(key), str | int | float)]
    return sorted(present, key=lambda each: each[key], reverse=is_downwards) + rest


def _page(found: list[Document], body: Document) -> tuple[list[Document], Document]:
    """Returns a part of a list, and where it goes on."""
    start = int(body.get("NextToken", 0))
    end = start + body.get("MaxResults", len(found))
    return found[start:end], ({"NextToken": str(end)} if end < len(found) else {})
