"""Jobs of a cluster that Slurm manages: the supervisor is the batch script.

The folder of the jobs is on a file system that all nodes see. Slurm forgets ended jobs, so the
truth is the job's own status; Slurm is asked only whether somebody will still write it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.job.supervisor import MODULE, grace_seconds
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.document import TrainingJob

#: Options of sbatch by type of host; ``*`` is for all.
OPTIONS_VARIABLE = "SMP_SLURM_OPTIONS"
#: Options of the user that say how many GPUs there are.
_OF_GPUS = ("--gpus", "--gres", "-G")
_LIMIT_SECONDS = 30.0
#: For archives, and for what smprun needs beyond the time of its ranks.
_ENDING_SECONDS = 60.0
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING")


class SlurmBackend:
    """A cluster."""

    name = "slurm"

    def submit(self, folder: JobFolder) -> None:
        """Queues a job.

        Raises:
            LaunchError: Slurm does not take it.
        """
        request = folder.request()
        script = folder.path / "batch.sh"
        # exec: signals for the batch script reach the supervisor.
        words = (sys.executable, "-m", MODULE, str(folder.path))
        script.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
        options = batch_options(request, os.environ)
        log = folder.logs / "supervisor.log"
        named = ("sbatch", "--parsable", f"--job-name={folder.name}", f"--output={log}")
        try:
            done = _slurm(*named, *options, str(script))
        except LaunchError as error:
            if "gres" not in str(error):
                raise
            kind = request.resource_config.instance_type
            raise LaunchError(
                f"{error}: the nodes do not have the GPUs of {kind}"
                f'; {OPTIONS_VARIABLE}=\'{{"*": "--gres=none"}}\' asks for none.'
            ) from None
        (folder.path / "slurm-job").write_text(done.partition(";")[0].strip())

    def observe(self, folder: JobFolder) -> Status:
        """Returns how a job stands; a queued one is Pending."""
        status = folder.status()
        if status.is_final or not (number := _number_of(folder)):
            return status
        try:
            state = _state_of(number)
        except LaunchError:
            return status  # nobody to ask is no reason to give up a job
        if state in _WAITING:
            return status.waiting(f"Job {number} waits in the queue of Slurm")
        if state in _RUNNING:
            return folder.status()
        if folder.is_asked_to_stop and status.training_start_time is None:
            return folder.bury("stopped on request", is_stopped=True)
        return folder.bury(
            f"InternalServerError: job {number} of Slurm has ended ({state or 'unknown'}) without "
            "a word: a node was lost, or its time was over. logs/supervisor.log may say more."
        )

    def stop(self, folder: JobFolder) -> None:
        """Leaves word, and sends SIGTERM to the supervisor alone; a queued job is taken back."""
        folder.ask_to_stop()
        number = _number_of(folder)
        if _state_of(number) in _WAITING:
            _slurm("scancel", number)
        else:
            # A plain scancel ends Slurm's own steps too, and ranks have no time to save.
            _slurm("scancel", "--batch", "--signal=TERM", number)


def batch_options(request: TrainingJob, environ: Mapping[str, str]) -> list[str]:
    """Returns sbatch's options for a job.

    Raises:
        ConfigError: the options of the user are no map of types of hosts.
    """
    resources = request.resource_config
    kind = resources.instance_type or machines.LOCAL
    seconds = request.stopping_condition.max_runtime_in_seconds + grace_seconds(environ)
    warning = math.ceil(grace_seconds(environ) + _ENDING_SECONDS)
    options = [
        f"--nodes={resources.instance_count}",
        "--ntasks-per-node=1",
        f"--time={math.ceil((seconds + _ENDING_SECONDS) / 60)}",
        f"--signal=B:TERM@{warning}",
        "--open-mode=append",
        "--requeue" if request.enable_managed_spot_training else "--no-requeue",
    ]
    found = _chosen_options(environ)
    chosen = [*found.get("*", []), *found.get(kind, [])]
    gpus = machines.num_gpus(kind)
    if gpus and not any(word.startswith(_OF_GPUS) for word in chosen):
        options.append(f"--gpus-per-node={gpus}")
    return [*options, *chosen]


def _chosen_options(environ: Mapping[str, str]) -> dict[str, list[str]]:
    text = environ.get(OPTIONS_VARIABLE, "{}")
    try:
        found: Any = json.loads(text)
        return {str(kind): shlex.split(words) for kind, words in found.items()}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(
            f"{OPTIONS_VARIABLE} must be a JSON object of types of hosts and options of sbatch; "
            f'got {text!r}: write \'{{"*": "--partition=main"}}\'.'
        ) from None


def _number_of(folder: JobFolder) -> str:
    try:
        return (folder.path / "slurm-job").read_text()
    except FileNotFoundError:
        return ""


def _state_of(number: str) -> str:
    """Returns Slurm's word for the state of a job; empty for one that it has forgotten."""
    try:
        return _slurm("squeue", "-h", "-j", number, "-t", "all", "-o", "%T").strip()
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return ""
        raise


def _slurm(*words: str) -> str:
    """Runs a command of Slurm; returns what it prints."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{words[0]} of Slurm must work here; {error}.") from None
    if done.returncode:
        raise LaunchError(f"{words[0]} of Slurm: {done.stderr.strip()}")
    return done.stdout
