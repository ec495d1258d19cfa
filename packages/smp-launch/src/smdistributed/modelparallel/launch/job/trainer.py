"""Jobs of ``ModelTrainer``, version 3 of the service's SDK, in the words of all other jobs.

They bring their code in a channel, and in another one a shell script and Python programs that a
container would run, with two files of JSON that say what these are to do. Here the files are read
and the programs are not run: scripts are started by what starts those of other jobs. A program of
the user's own, in the place of one of the SDK's, is a command.

Source: the SDK's public classes ``SourceCode``, ``Torchrun``, ``MPI`` and ``SMP``, and the
documents that they become.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.config.source import LAUNCH_VARIABLE, read_launch
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.channels import file as file_channels
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request import parallelism
from smdistributed.modelparallel.launch.request.document import Channel, TrainingJob

#: The channels, and the files in the second one.
CODE, DRIVERS = "code", "sm_drivers"
SOURCE_FILE, STARTER_FILE, SCRIPT_FILE = "sourcecode.json", "distributed.json", "sm_train.sh"
#: The programs that start scripts, in a folder of the second channel.
FOLDER = "distributed_drivers"
ALONE, TORCHRUN, MPI = "basic_script_driver.py", "torchrun_driver.py", "mpi_driver.py"
_CONTAINER_FOLDER = f"/opt/ml/input/data/{DRIVERS}/{FOLDER}"


def settled(request: TrainingJob, root: Path) -> TrainingJob:
    """Returns a document that says by hyperparameters what these channels say; others as they are.

    Args:
        request: of any job.
        root: the folder of the jobs.

    Raises:
        ConfigError: something in them breaks a rule.
        StorageError: they cannot be read.
        UnsupportedError: they ask for what is not offered.
    """
    channels = {channel.channel_name: channel for channel in request.input_data_config}
    if DRIVERS not in channels or not request.algorithm_specification.container_arguments:
        return request
    files = _read(channels[DRIVERS], root)
    source, starter = json.loads(files[SOURCE_FILE]), json.loads(files[STARTER_FILE])
    found = re.search(rf"{FOLDER}/(\S+)", files[SCRIPT_FILE])
    driver = found[1] if found else ALONE
    own: dict[str, Any] = {names.DRIVER: driver, names.DRIVER_CONFIG: starter}
    if CODE in channels:
        own[names.SUBMIT_DIRECTORY] = file_channels.address_of(channels[CODE])
    if requirements := source.get("requirements"):
        own[names.REQUIREMENTS] = requirements
    if program := source.get("entry_script"):
        own[names.PROGRAM] = program
    environment = dict(request.environment)
    if command := _command(source, driver):
        own[names.COMMAND] = command
    else:
        own |= _started(driver, starter)
        if (given := starter.get("smp")) is not None:
            own[names.MP_PARAMETERS] = _parallelism(given, environment)
    values = {**request.hyper_parameters, **names.encode(own)}
    return request.model_copy(update={"hyper_parameters": values, "environment": environment})


def arguments(user: Mapping[str, Any]) -> list[str]:
    """Returns the script's arguments as the SDK's programs write them: JSON but for texts."""
    words = []
    for name, value in user.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def variables(
    values: Mapping[str, Any], data: Path, output: Path, hosts: Sequence[str], host: str
) -> dict[str, Any]:
    """Returns the variables that these jobs have and others do not.

    Args:
        values: all hyperparameters.
        data: the folder of all channels.
        output: the folder of results.
        hosts: the names of all of them.
        host: the name of the one that asks.
    """
    user = names.of_script(values)
    drivers = {
        "SM_DISTRIBUTED_DRIVER_DIR": str(data / DRIVERS / FOLDER),
        "SM_DISTRIBUTED_CONFIG": values[names.DRIVER_CONFIG],
    }
    return {
        **(drivers if values[names.DRIVER_CONFIG] else {}),
        "SM_SOURCE_DIR": str(data / CODE),
        "SM_ENTRY_SCRIPT": values.get(names.PROGRAM, ""),
        "SM_INPUT_DATA_DIR": str(data),
        "SM_OUTPUT_FAILURE": str(output / "failure"),
        "SM_HOST_COUNT": len(hosts),
        "SM_CURRENT_HOST_RANK": hosts.index(host),
        **{f"SM_HP_{name.replace('-', '_').upper()}": value for name, value in user.items()},
    }


def _read(channel: Channel, root: Path) -> dict[str, str]:
    wanted = (SOURCE_FILE, STARTER_FILE, SCRIPT_FILE)
    entries = {entry.name: entry.source for entry in file_channels.entries_of(channel, root)}
    if absent := [name for name in wanted if name not in entries]:
        raise ConfigError(
            f"channel {DRIVERS} must have {', '.join(wanted)}, as ModelTrainer writes them; there "
            f"is no {' and no '.join(absent)}: give the channel another name if it is yours."
        )
    return {name: entries[name].files.cat_file(entries[name].path).decode() for name in wanted}


def _command(source: Mapping[str, Any], driver: str) -> str:
    """Returns what a shell is to run; empty where a script is started."""
    if command := source.get("command"):
        words = (shlex.quote(str(word)) for word in source.get("args") or ())
        return " ".join((*command.split(), *words))
    if driver in (ALONE, TORCHRUN, MPI):
        return ""
    return f"python3 {_CONTAINER_FOLDER}/{shlex.quote(driver)}"


def _started(driver: str, starter: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of what starts the processes; None is one for each GPU."""
    processes = starter.get("process_count_per_node")
    if driver == TORCHRUN:
        return {names.TORCH_DISTRIBUTED: True, names.TORCH_PROCESSES: processes}
    if driver == MPI:
        options = starter.get("mpi_additional_options") or ()
        return {
            names.MPI_ENABLED: True,
            names.MPI_PROCESSES: processes,
            names.MPI_OPTIONS: shlex.join(options),
        }
    return {}


def _parallelism(given: Mapping[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Returns the parameters of both, and takes them out of the variables, which would win."""
    problems: list[str] = []
    beside = read_launch(environment, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    environment.pop(LAUNCH_VARIABLE, None)
    return parallelism.of_version_2(given, beside)
