"""Where jobs live, and what can be done with them by name.

Source: estimator interface, sections 0, 1 (session) and 2.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.backends import base
from smdistributed.modelparallel.launch.backends.local import LocalBackend
from smdistributed.modelparallel.launch.backends.slurm import SlurmBackend
from smdistributed.modelparallel.launch.channels import file as file_channels
from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException
from smdistributed.modelparallel.launch.experiments.service import Experiments
from smdistributed.modelparallel.launch.job import (
    contract,
    feeding,
    folder,
    logs,
    metrics,
    nodes,
    status,
    trainer,
)
from smdistributed.modelparallel.launch.job.code import Code
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.request import distribution, document, machines
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request.naming import ACCOUNT, parse_image
from smdistributed.modelparallel.launch.serving.service import Serving
from smdistributed.modelparallel.launch.storage import boto, places
from smdistributed.modelparallel.launch.storage.transfer import download_all, upload

__all__ = ["LocalSession", "Session", "get_execution_role"]

#: Of the one caller that there is here.
ROLE = f"arn:aws:iam::{ACCOUNT}:role/local"

_BUCKET = "smp-launch"
_BACKEND_VARIABLE = "SMP_BACKEND"
_BACKENDS: dict[str, base.Backend] = {
    backend.name: backend for backend in (LocalBackend(), SlurmBackend())
}
#: What somebody may look for, and the way out.
_CONTAINERS = "jobs run in this Python environment; in a container of your own, use 'local'"
_HOSTS = "use 'slurm', or start the script itself on hosts that ssh reaches by 'smprun --hosts'"
_NOT_OFFERED = {
    **dict.fromkeys(("docker", "podman", "container", "containers"), _CONTAINERS),
    **dict.fromkeys(("hosts", "ssh"), _HOSTS),
    **dict.fromkeys(("kubernetes", "k8s"), "use 'slurm', or 'local' in a pod of your own"),
}


class Session:
    """Where jobs are: a folder of this machine, and who runs them.

    Args:
        boto_session: of boto3; default a new one where boto3 is installed.
        default_bucket: the name of the bucket that ``default_bucket`` makes and returns.
        default_bucket_prefix: what keys in that bucket begin with.
        root: the folder of all jobs; default ``SMP_JOBS``, else one in the user's home.
        backend: who runs jobs, ``local`` or ``slurm``; default ``SMP_BACKEND``, else ``local``.
        others: arguments of the service's session; without effect.
    """

    def __init__(
        self,
        boto_session: object = None,
        *,
        default_bucket: str = _BUCKET,
        default_bucket_prefix: str | None = None,
        root: str | Path | None = None,
        backend: str | None = None,
        **others: object,
    ) -> None:
        self._boto_session = boto_session
        self.default_bucket_prefix = default_bucket_prefix
        self.root = Path(root).expanduser().absolute() if root else places.jobs_root()
        self.bucket_name = default_bucket
        self.backend = backend or os.environ.get(_BACKEND_VARIABLE, "local")
        if self.backend in _NOT_OFFERED:
            raise UnsupportedError(
                f"the back-end {self.backend!r} is not offered: {_NOT_OFFERED[self.backend]}."
            )
        if self.backend not in _BACKENDS:
            raise ConfigError(
                f"the back-end must be one of {', '.join(_BACKENDS)}; got {self.backend!r}."
            )
        if given := sorted(name for name, value in others.items() if value is not None):
            warnings.warn(f"no effect here: {', '.join(given)}.", ConfigWarning, stacklevel=2)

    @property
    def serving(self) -> Serving:
        """Models and endpoints of this folder of jobs."""
        return Serving(self.root)

    @property
    def experiments(self) -> Experiments:
        """Experiments of this folder of jobs, and what belongs to them."""
        return Experiments(self.root, self.observe)

    @property
    def boto_session(self) -> Any:
        """The session of boto3 that was given, or a new one.

        Raises:
            UnsupportedError: its clients are asked for, and boto3 is not installed.
        """
        if self._boto_session is None:
            self._boto_session = boto.session(self.boto_region_name)
        return self._boto_session

    @property
    def boto_region_name(self) -> str:
        """The region; there is one."""
        return str(getattr(self._boto_session, "region_name", None) or boto.region())

    @property
    def sagemaker_client(self) -> Any:
        """A client of the service, by boto3."""
        return self.boto_session.client("sagemaker")

    def default_bucket(self) -> str:
        """Returns the bucket for what has no place of its own; it is made if it is not there.

        Raises:
            StorageError: it cannot be made.
        """
        places.make_bucket(places.locate(f"s3://{self.bucket_name}", self.root))
        return self.bucket_name

    def account_id(self) -> str:
        """Returns the account; there is one."""
        return ACCOUNT

    def get_caller_identity_arn(self) -> str:
        """Returns the role; there is one."""
        return ROLE

    def upload_data(
        self, path: str, bucket: str | None = None, key_prefix: str = "data", **_: object
    ) -> str:
        """Copies a file, or the files of a folder, to a bucket; returns their address.

        Raises:
            ConfigError: there is nothing at the path.
        """
        source = Path(path).expanduser()
        if not source.exists():
            raise ConfigError(f"there is nothing to upload at {source.absolute()}: correct it.")
        before = None if bucket else self.default_bucket_prefix
        words = (f"s3://{bucket or self.default_bucket()}", before, key_prefix.strip("/"))
        address = "/".join(filter(None, words))
        if source.is_file():
            address = f"{address}/{source.name}"
            upload(source, places.locate(address, self.root))
            return address
        for file in sorted(source.rglob("*")):
            if file.is_file():
                key = f"{address}/{file.relative_to(source).as_posix()}"
                upload(file, places.locate(key, self.root))
        return address

    def download_data(self, path: str, bucket: str, key_prefix: str = "", **_: object) -> list[str]:
        """Copies what begins with a key to a folder; returns the files."""
        location = places.locate(f"s3://{bucket}/{key_prefix}", self.root)
        return download_all(location, Path(path))

    def start(self, request: Mapping[str, Any], code: Code | None = None) -> JobFolder:
        """Starts a job; returns its folder.

        Args:
            request: the document.
            code: packed to the address that the document names; None if it is there already.

        Raises:
            ConfigError: the document breaks rules, or there is a job of this name.
            UnknownExperimentError: it names an experiment or a trial that is not there.
            StorageError: data is missing, or results cannot be written.
        """
        given = document.read(request)
        job = trainer.settled(given, self.root)
        image = parse_image(job.algorithm_specification.training_image or "")
        values, hosts = names.decode(job.hyper_parameters), job.resource_config
        if not (values.get(names.SUBMIT_DIRECTORY) or values.get(names.COMMAND)):
            raise UnsupportedError(
                f"images are not run here, their scripts are; the job names "
                f"{image.repository or 'none'} and no script of its own: give entry_point, or "
                f"{names.PROGRAM} and {names.SUBMIT_DIRECTORY} among the hyperparameters."
            )
        contract.check_machine(hosts.instance_type or machines.LOCAL)
        distribution.check_world(values, image.script_framework, hosts.instance_count)
        nodes.check(
            hosts.instance_count,
            os.environ,
            has_mpi=bool(values.get(names.MPI_ENABLED)),
            has_pipes=bool(feeding.piped(job)),
        )
        self.experiments.check(given.experiment_config)
        metrics.compiled(job.algorithm_specification.metric_definitions)
        for channel in job.input_data_config:
            mode = contract.mode_of(channel, job)
            file_channels.check(channel, self.root, mode, job.resource_config.instance_count)
        places.make_root(self.root)
        places.check_writable(places.locate(job.output_data_config.s3_output_path, self.root))
        backend = _BACKENDS[self.backend]
        with folder.created(self.root, given, status.new(base.about(backend))) as created:
            if code is not None:
                self._ship(code, contract.values(created, job)[names.SUBMIT_DIRECTORY])
            self.experiments.add_job(created, given.experiment_config)
            backend.submit(created)
        return created

    def job(self, name: str) -> JobFolder:
        """Returns the folder of a job.

        Raises:
            UnknownJobError: there is none.
        """
        return folder.find(self.root, name)

    def observe(self, job: JobFolder) -> Status:
        """Returns how a job stands now."""
        return _backend_of(job).observe(job)

    def describe_training_job(self, job_name: str) -> dict[str, Any]:
        """Returns the document of a job, and how it stands.

        Raises:
            UnknownJobError: there is no such job.
        """
        job = self.job(job_name)
        now = self.observe(job).model_dump(mode="json", by_alias=True, exclude_none=True)
        request = job.request().as_json()
        if rules := status.of_rules(request):
            now["DebugRuleEvaluationStatuses"] = rules
        return {**request, **now}

    def stop_training_job(self, job_name: str) -> None:
        """Asks a job to end; its processes have time to save.

        Raises:
            UnknownJobError: there is no such job.
        """
        job = self.job(job_name)
        if not self.observe(job).is_final:
            _backend_of(job).stop(job)

    def wait_for_job(self, job: str, poll: float = 0) -> dict[str, Any]:
        """Waits for the end of a job, and shows its phases.

        Raises:
            UnexpectedStatusException: it failed.
        """
        return self.logs_for_job(job, wait=True, with_logs=False)

    def logs_for_job(
        self,
        job_name: str,
        wait: bool = False,
        poll: float = 0,
        log_type: str = "All",
        *,
        with_logs: bool = True,
        out: TextIO | None = None,
    ) -> dict[str, Any]:
        """Shows the log of a job: what there is, or until its end.

        Raises:
            UnexpectedStatusException: it was waited for, and failed.
        """
        job = self.job(job_name)
        with logs.Follower(
            job, lambda: self.observe(job), out, with_logs=with_logs, with_phases=wait
        ) as follower:
            try:
                ended = follower.show(until_end=wait)
            except KeyboardInterrupt:
                print(
                    f"\nThe job goes on: 'smp-launch logs {job.name}' follows it, "
                    f"'smp-launch stop {job.name}' ends it.",
                    file=sys.stderr,
                )
                raise
        if wait and ended.training_job_status == "Failed":
            reason = ended.failure_reason or ""
            if with_logs:
                # What follows are the last lines of the log, which stand above.
                reason = reason.partition("\n\n")[0]
            raise UnexpectedStatusException(
                f"job {job.name} failed: {reason}",
                ("Completed", "Stopped"),
                ended.training_job_status,
            )
        return self.describe_training_job(job_name)

    def delete_endpoint(self, endpoint_name: str) -> None:
        """Ends an endpoint.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        self.serving.delete_endpoint(endpoint_name)

    def delete_endpoint_config(self, endpoint_config_name: str) -> None:
        """Forgets the configuration of endpoints.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        self.serving.delete_endpoint_config(endpoint_config_name)

    def delete_model(self, model_name: str) -> None:
        """Forgets a model; its archive stays.

        Raises:
            UnknownEndpointError: there is none of this name.
        """
        self.serving.delete_model(model_name)

    def default_place(self) -> str:
        """Returns where the code of jobs goes that is given no place."""
        return str(self.root) if places.has_object_store() else f"s3://{self.bucket_name}"

    def _ship(self, code: Code, address: str) -> None:
        with tempfile.TemporaryDirectory() as place:
            archive = Path(place, "sourcedir.tar.gz")
            code.pack(archive)
            upload(archive, places.locate(address, self.root))


def _backend_of(job: JobFolder) -> base.Backend:
    return _BACKENDS[job.status().backend.get("kind", "local")]


class LocalSession(Session):
    """The same: every session is of this machine."""


def get_execution_role(sagemaker_session: object = None, **_: object) -> str:
    """Returns a role for arguments that want one; nothing is done with it."""
    return ROLE
