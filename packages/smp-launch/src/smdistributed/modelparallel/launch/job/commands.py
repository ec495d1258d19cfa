"""What is run for a job on this machine, and what it sees."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.bootstrap import HOSTS_VARIABLE
from smdistributed.modelparallel.common.launcher.gpus import usable_gpus
from smdistributed.modelparallel.launch import channels
from smdistributed.modelparallel.launch.job import clusters, contract, feeding, warden
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.job.nodes import Nodes, nodes_of
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.document import MOST_RETRIES, TrainingJob
from smdistributed.modelparallel.launch.request.naming import parse_image

#: smprun ends ranks in steps of seconds.
_SMPRUN_SECONDS = 10.0
#: Where scripts of streams find ``sagemaker_tensorflow``.
_READERS = Path(channels.__file__).parent / "import_path"
#: The words that start ``smprun``.
SMPRUN = ("-m", "smdistributed.modelparallel.common.launcher")


@dataclass(frozen=True)
class Command:
    """A process to start.

    Attributes:
        host: the name of the host that it stands for.
        words: the command line.
        environ: all of its variables.
        folder: where it starts.
        needs_seconds: beyond the time of the script, to end it and itself.
        serves: whether it goes on for ever, and ends when the others are done.
    """

    host: str
    words: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path
    needs_seconds: float = 0.0
    serves: bool = False


def commands_of(
    folder: JobFolder, request: TrainingJob, grace_seconds: float, environ: Mapping[str, str]
) -> list[Command]:
    """Returns the processes of a job: one ``smprun`` for all hosts, or a script for each host.

    Args:
        folder: of the job.
        request: its document.
        grace_seconds: what processes have between SIGTERM and their end.
        environ: the variables of the supervisor.

    Raises:
        ConfigError: the script cannot be run.
    """
    values = contract.values(folder, request)
    own_starter, words = _what_runs(folder, values)
    count = request.resource_config.instance_count
    nodes = nodes_of(count, environ)
    gpus = usable_gpus(environ)
    hosts = contract.hosts(count, gpus, share_a_machine=nodes.are_here)
    commands = _feeders(folder, request, nodes.names, environ)
    meeting = clusters.meeting_point(nodes.names) if names.DRIVER in values else {}
    if values.get(names.MPI_ENABLED):
        launcher = _smprun(values, hosts, request, grace_seconds)
        own = {**_environ(folder, request, hosts[0], environ), **meeting}
        if others := contract.differing(folder, request, hosts):
            own[HOSTS_VARIABLE] = json.dumps(others)
        if nodes.by_ssh:
            launcher += _over_ssh(nodes, own, environ)
        started = (sys.executable, *launcher, *words)
        ranks = Command(hosts[0].name, started, own, folder.code, _SMPRUN_SECONDS)
        return [*commands, ranks]
    for role in clusters.roles(values, nodes.names, hosts[0].num_gpus):
        host, node = hosts[role.host], nodes.names[role.host]
        own = {**_environ(folder, request, host, environ), **meeting, **role.variables}
        whole = (*_reach(node), *(own_starter or role.starter), *words)
        if not node:
            # Steps of Slurm are ended by Slurm, and ranks by smprun.
            whole = warden.guarded(whole, grace_seconds)
        commands.append(Command(host.name + role.name, whole, own, folder.code, serves=role.serves))
    return commands


def _feeders(
    folder: JobFolder, request: TrainingJob, nodes: Sequence[str], environ: Mapping[str, str]
) -> list[Command]:
    """Returns what feeds the pipes of each host, where channels are streams."""
    if not feeding.piped(request):
        return []
    found = []
    for name, node in zip(contract.host_names(len(nodes)), nodes, strict=True):
        words = (*_reach(node), sys.executable, "-m", feeding.MODULE, str(folder.path), name)
        found.append(Command(f"pipe-{name}", words, environ, folder.path, serves=True))
    return found


def _over_ssh(nodes: Nodes, own: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what has smprun reach other machines, and hand on what the job adds to variables."""
    added = sorted(name for name, text in own.items() if environ.get(name) != text)
    exported = " ".join(f"-x {name}" for name in added)
    return (f"--hosts={','.join(nodes.names)}", f"--mpi-args={exported}")


def _reach(node: str) -> tuple[str, ...]:
    """Returns what starts a process on a node: nothing here, a step of Slurm elsewhere."""
    if not node:
        return ()
    step = ("srun", "--nodes=1", "--ntasks=1", "--mpi=none", "--overlap", "--quiet")
    return (*step, f"--nodelist={node}")


def _what_runs(
    folder: JobFolder, values: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the words of a shell, where that is what starts it; and the script and its arguments.

    Raises:
        ConfigError: there is no such script.
    """
    if command := values.get(names.COMMAND):
        return ("/bin/bash", "-e", "-c"), (str(command),)
    program = str(values.get(names.PROGRAM, ""))
    script = folder.code / program
    if not program or not script.resolve().is_relative_to(folder.code.resolve()):
        raise ConfigError(
            f"{names.PROGRAM} must be a file of the code; got {program!r}: name the script."
        )
    if not script.is_file():
        raise ConfigError(f"{names.PROGRAM} must be a file of the code; there is no {program}.")
    shell = ("/bin/sh",) if script.suffix == ".sh" else ()
    return shell, (program, *contract.arguments(values))


def _smprun(
    values: Mapping[str, Any],
    hosts: Sequence[contract.Host],
    request: TrainingJob,
    grace_seconds: float,
) -> tuple[str, ...]:
    # By default one a GPU, of this machine or else of the type, as the service's toolkit has it.
    gpus = hosts[0].num_gpus or machines.num_gpus(request.resource_config.instance_type or "")
    each = values.get(names.MPI_PROCESSES) or gpus or 1
    num_ranks = len(hosts) * int(each)
    image = parse_image(request.algorithm_specification.training_image or "")
    options = [f"--framework={image.framework or 'pytorch'}", f"--grace={grace_seconds:g}"]
    if restarts := _num_restarts(request):
        options.append(f"--restarts={restarts}")
    if given := values.get(names.MPI_OPTIONS):
        options.append(f"--mpi-args={given}")
    return (*SMPRUN, "-n", str(num_ranks), *options)


def _num_restarts(request: TrainingJob) -> int:
    """Returns how often a job may start again that has lost a rank or a host."""
    if request.retry_strategy is not None:
        return request.retry_strategy.maximum_retry_attempts
    return MOST_RETRIES if request.enable_managed_spot_training else 0


def _environ(
    folder: JobFolder, request: TrainingJob, host: contract.Host, environ: Mapping[str, str]
) -> dict[str, str]:
    # Of a job that starts this one.
    inherited = {name: text for name, text in environ.items() if not name.startswith("SM_")}
    # Last, so that a reader of pipes that is installed wins.
    readers = [str(_READERS)] if feeding.piped(request) else []
    installed = [str(folder.packages)] if folder.packages.is_dir() else []
    path = [str(folder.code), *installed, *filter(None, [environ.get("PYTHONPATH")]), *readers]
    # What a shell calls python is this one, and its tools are those beside it.
    programs = [str(Path(sys.executable).parent), *filter(None, [environ.get("PATH")])]
    found = {"PYTHONPATH": os.pathsep.join(path), "PATH": os.pathsep.join(programs)}
    return {**inherited, **found, **contract.environment(folder, request, host)}
