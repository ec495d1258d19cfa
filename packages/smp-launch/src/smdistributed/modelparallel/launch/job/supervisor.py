"""The supervisor of a job: ``python -m ... FOLDER [LOCK]`` runs the job, and ends with it.

It is the only process that writes the status, and holds the job's lock while it lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.launcher import slurm
from smdistributed.modelparallel.common.launcher.gpus import usable_gpus
from smdistributed.modelparallel.launch.channels import file as file_channels
from smdistributed.modelparallel.launch.channels import pipe
from smdistributed.modelparallel.launch.job import (
    code,
    contract,
    literal_paths,
    requirements,
    results,
    trainer,
)
from smdistributed.modelparallel.launch.job.checkpoints import Keeper
from smdistributed.modelparallel.launch.job.commands import Command, commands_of
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.metrics import Recorder
from smdistributed.modelparallel.launch.job.nodes import nodes_of
from smdistributed.modelparallel.launch.job.running import Outcome, Run
from smdistributed.modelparallel.launch.job.status import Artifacts, Phase, State, Status
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request.document import Channel
from smdistributed.modelparallel.launch.request.naming import parse_image
from smdistributed.modelparallel.launch.storage.places import locate
from smdistributed.modelparallel.launch.storage.transfer import download, download_all

#: What processes have between SIGTERM and their end, in seconds.
GRACE_VARIABLE = "SMP_STOP_GRACE_SECONDS"
_GRACE_SECONDS = 120.0
#: What ``python -m`` runs.
MODULE = "smdistributed.modelparallel.launch.job.supervisor"
_REASON_LENGTH = 1024
#: Of a supervisor that its scheduler starts again.
_INTERRUPTED_EXIT_CODE = 75
_DISTRIBUTIONS = {"pytorch": "torch", "tensorflow": "tensorflow"}
_ENDS: dict[str, tuple[State, Phase]] = {
    "completed": ("Completed", "Completed"),
    "failed": ("Failed", "Failed"),
    "stopped": ("Stopped", "Stopped"),
    "timeout": ("Stopped", "MaxRuntimeExceeded"),
    "interrupted": ("InProgress", "Interrupted"),
}


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Returns what processes have between SIGTERM and their end.

    Raises:
        ConfigError: the variable is no number.
    """
    text = environ.get(GRACE_VARIABLE, str(_GRACE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{GRACE_VARIABLE} must be a number of seconds; got {text!r}.")
    return seconds


class _StopRequested(Exception):  # noqa: N818 - a request
    """Somebody wants the job to end before its script runs."""


class Supervisor:
    """Runs one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._given = folder.request()
        self._request = self._given
        self._status: Status = folder.status()
        self._is_signalled = False
        self._keepers: list[Keeper] = []
        self._metrics = Recorder(
            self._request.algorithm_specification.metric_definitions, folder.metrics
        )

    def run(self) -> int:
        """Runs the job; returns the exit code of its script."""
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            outcome = self._run()
        except _StopRequested:
            outcome = Outcome("stopped", 0, "stopped on request")
        except (SMPError, OSError) as error:
            outcome = Outcome("failed", 1, str(error))
        except Exception as error:
            traceback.print_exc()
            outcome = Outcome("failed", 1, f"{type(error).__name__}: {error}")
        return self._finish(outcome)

    def _run(self) -> Outcome:
        self._enter("Downloading", "Preparing code and data")
        self._folder.clear()
        self._request = trainer.settled(self._given, self._folder.root)
        values = contract.values(self._folder, self._request)
        self._fetch_code(str(values.get(names.SUBMIT_DIRECTORY, "")))
        count = self._request.resource_config.instance_count
        host, *_ = contract.hosts(
            count, usable_gpus(), share_a_machine=nodes_of(count, os.environ).are_here
        )
        for name, content in contract.config_files(self._given, host).items():
            (self._folder.config / name).write_text(json.dumps(content), encoding="utf-8")
        for channel in self._request.input_data_config:
            self._fill(channel)
        self._check_for_stop()
        log = self._folder.logs / "algo-1.log"
        listed = requirements.listed(values)
        if count := requirements.install(self._folder, listed, log, self._check_for_stop):
            self._say(f"{count} distributions of {listed} are installed for this job")
        grace = grace_seconds(os.environ)
        commands = commands_of(self._folder, self._request, grace, os.environ)
        for name in ("checkpoints", "output/intermediate"):
            (self._folder.path / name).mkdir(parents=True, exist_ok=True)
        commands = self._as_in_containers(commands)
        for command in commands:
            (self._folder.logs / f"{command.host}.log").touch()
        self._remark(host)
        self._keepers = [*self._restored(), *self._kept_for_tensorboard()]
        seconds = self._request.stopping_condition.max_runtime_in_seconds
        self._enter("Training", "Running the script", training_start_time=time.time())
        with (
            Run(commands, self._folder.logs, self._metrics.look_at, grace) as running,
            # After the processes have started: a fork does not copy threads.
            contextlib.ExitStack() as kept,
        ):
            for keeper in self._keepers:
                kept.enter_context(keeper)
            outcome = running.wait(seconds, self._is_to_stop)
            if outcome.ending == "failed":
                last = running.last_lines()
                self._leave_word(f"{outcome.reason}\n\n{last}\n")
        if outcome.ending == "stopped" and self._is_taken_away:
            return Outcome("interrupted", 0, "The hosts were taken away; it starts again on others")
        if outcome.ending == "stopped" and self._has_lost_a_node():
            return Outcome("failed", 1, "a node of the allocation was lost")
        return outcome

    def _fill(self, channel: Channel) -> None:
        """Makes the data of a channel, or its pipes, for each host that has its own."""
        hosts = contract.host_names(self._request.resource_config.instance_count)
        mode = contract.mode_of(channel, self._request)
        done = set()
        for index, host in enumerate(hosts):
            base = contract.channel_base(self._folder, self._request, channel, host)
            if base in done:
                continue
            done.add(base)
            if channel.channel_name == trainer.CODE and self._request is not self._given:
                # It is there already, as copies: a script may write beside itself.
                base.parent.mkdir(parents=True, exist_ok=True)
                base.symlink_to(Path("../..", self._folder.code.name), target_is_directory=True)
                continue
            if mode == "Pipe":
                pipe.make(base, 0)
                continue
            share = file_channels.Share(index, len(hosts))
            root = self._folder.root
            file_channels.fill(channel, base, root, mode, self._check_for_stop, share)

    def _as_in_containers(self, commands: list[Command]) -> list[Command]:
        """Puts the folder, and names of hosts, where the script looks for them, if it can be."""
        count = self._request.resource_config.instance_count
        is_alone = not slurm.is_inside(os.environ) and nodes_of(count, os.environ).are_here
        aliases = contract.host_names(count) if is_alone and count > 1 else ()
        values = contract.values(self._folder, self._request)
        command = str(values.get(names.COMMAND, ""))
        has_place = literal_paths.PLACE in command or literal_paths.are_in(self._folder.code)
        if not (has_place or aliases):
            return commands
        if not is_alone or not literal_paths.can_be_shown():
            if has_place:
                self._say("the script names /opt/ml, which is not there: use the variables SM_*")
            if aliases:
                self._say(
                    f"{aliases[0]} and the like are no addresses here: 127.0.0.1 is all of them"
                )
            return commands
        path = self._folder.path
        return [
            dataclasses.replace(
                command,
                words=literal_paths.shown(path, command.words, has_place=has_place, names=aliases),
            )
            for command in commands
        ]

    def _restored(self) -> Iterator[Keeper]:
        """Brings back the checkpoints of an earlier job, if they are to be kept anywhere."""
        config = self._request.checkpoint_config
        if config is None:
            return
        place = Path(self._folder.inside(config.local_path))
        keeper = Keeper(place, locate(config.s3_uri, self._folder.root), self._say)
        if count := keeper.restore(self._check_for_stop):
            self._say(f"{count} files of checkpoints are restored from {config.s3_uri}")
        yield keeper

    def _kept_for_tensorboard(self) -> Iterator[Keeper]:
        """Makes the folder of TensorBoard's files, if they are to be kept anywhere."""
        config = self._request.tensor_board_output_config
        if config is None:
            return
        place = Path(self._folder.inside(config.local_path))
        place.mkdir(parents=True, exist_ok=True)
        name = self._request.training_job_name
        address = f"{config.s3_output_path.rstrip('/')}/{name}/tensorboard-output"
        # Its files grow line by line, and are read while they do.
        yield Keeper(place, locate(address, self._folder.root), self._say, grows=True)

    def _fetch_code(self, address: str) -> None:
        """Unpacks the archive of the code, or copies the folder that it is in."""
        if not address:
            self._folder.code.mkdir()
            return
        source = locate(address, self._folder.root)
        if path := source.local:
            take = shutil.copytree if path.is_dir() else code.unpack
            take(path, self._folder.code)
            return
        if not address.endswith(".gz"):
            download_all(source, self._folder.code)
            return
        archive = self._folder.path / "source.tar.gz"
        download(source, archive)
        code.unpack(archive, self._folder.code)

    def _finish(self, outcome: Outcome) -> int:
        """Delivers results, whatever became of the script, and records the end."""
        artifacts = None
        try:
            if self._status.training_start_time is not None:
                self._enter("Uploading", "Packing results")
                for keeper in self._keepers:
                    keeper.copy()
                if found := results.deliver(self._folder, self._request):
                    artifacts = Artifacts(s3_model_artifacts=found)
        except (SMPError, OSError) as error:
            if outcome.ending != "failed":
                outcome = Outcome("failed", 1, f"results were not kept: {error}")
        state, phase = _ENDS[outcome.ending]
        if state == "Completed":
            (self._folder.output / "success").touch()
        reason = None
        if state == "Failed":
            reason = f"AlgorithmError: {self._own_word() or outcome.reason}"
            self._leave_word(reason)
        if state == "InProgress":
            self._enter(phase, outcome.reason)
            return _INTERRUPTED_EXIT_CODE
        now = time.time()
        self._enter(
            phase,
            outcome.reason.partition("\n")[0],
            training_job_status=state,
            failure_reason=reason,
            exit_code=outcome.exit_code,
            model_artifacts=artifacts,
            final_metric_data_list=self._metrics.final,
            training_end_time=now,
        )
        return outcome.exit_code

    def _enter(self, phase: Phase, message: str, **changes: object) -> None:
        self._status = self._status.entering(phase, message, **changes)
        self._folder.write_status(self._status)

    def _own_word(self) -> str:
        """Returns what the script itself says of its failure, as it may."""
        try:
            text = (self._folder.output / "failure").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return text.strip()[:_REASON_LENGTH]

    def _leave_word(self, reason: str) -> None:
        """Writes why the job failed, unless the script did."""
        with contextlib.suppress(OSError), (self._folder.output / "failure").open("x") as stream:
            stream.write(reason)

    def _remark(self, host: contract.Host) -> None:
        """Begins the log with what is otherwise than the job asks for."""
        image = parse_image(self._request.algorithm_specification.training_image or "")
        remarks = []
        if image.framework and image.framework_version:
            name = _DISTRIBUTIONS[image.framework]
            with contextlib.suppress(PackageNotFoundError):
                there = version(name)
                if there.partition("+")[0] != image.framework_version:
                    remarks.append(f"the job names {name} {image.framework_version}; runs {there}")
        python = f"py{sys.version_info.major}{sys.version_info.minor}"
        if image.py_version and image.py_version not in (python, "py3"):
            remarks.append(f"the job names Python {image.py_version}; runs {python}")
        if host.own_gpus == () and not slurm.is_inside(os.environ):
            remarks.append(
                f"{len(host.all_names)} hosts are parts of this machine, which has fewer GPUs: "
                "none is used"
            )
        for remark in remarks:
            self._say(remark)

    def _say(self, remark: str) -> None:
        with (self._folder.logs / "algo-1.log").open("a", encoding="utf-8") as log:
            log.write(f"smp-launch: {remark}.\n")

    def _on_signal(self, *_: object) -> None:
        self._is_signalled = True

    def _is_to_stop(self) -> bool:
        if not (self._is_signalled or self._folder.is_asked_to_stop):
            return False
        if self._status.secondary_status != "Stopping" and not self._is_taken_away:
            self._enter("Stopping", "Asking the script to end", training_job_status="Stopping")
        return True

    @property
    def _is_taken_away(self) -> bool:
        """Whether a scheduler ends the job for reasons of its own, and will start it again."""
        is_requeued = self._request.enable_managed_spot_training and slurm.is_inside(os.environ)
        return self._is_signalled and is_requeued and not self._folder.is_asked_to_stop

    def _has_lost_a_node(self) -> bool:
        """Whether a scheduler ends the job since it cannot go on; nobody asked for it."""
        is_own = self._folder.is_asked_to_stop or not slurm.is_inside(os.environ)
        return not is_own and slurm.has_lost_a_node(os.environ)

    def _check_for_stop(self) -> None:
        if self._is_to_stop():
            raise _StopRequested


def main(words: list[str]) -> int:
    """Runs a job, unless another process does."""
    folder = JobFolder(Path(words[0]))
    descriptor = int(words[1]) if len(words) > 1 else folder.lock()
    if descriptor is None:
        print(f"another process runs {folder.name}", file=sys.stderr)
        return 1
    # Processes of the job must not keep the lock of a supervisor that is gone.
    os.set_inheritable(descriptor, False)
    return Supervisor(folder).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
