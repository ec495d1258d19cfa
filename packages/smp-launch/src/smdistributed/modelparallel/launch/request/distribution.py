"""How ``distribution=`` is checked, and becomes hyperparameters.

Source: estimator interface, section 3; model-parallel-sm-sdk.md, Configuration parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.common.config import Framework
from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.config.source import LAUNCH_VARIABLE, read_given
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.common.launcher import mpi_options, settings
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request import machines

#: How else the second of these is spelled.
_ALSO = "process_per_host"
_MPI_KEYS = ("enabled", "processes_per_host", "custom_mpi_options")
#: Ways to start the processes beside MPI: the hyperparameter that asks for each, and whose it is.
_STARTERS: dict[str, tuple[str, Framework]] = {
    "parameter_server": (names.PARAMETER_SERVER, "tensorflow"),
    "multi_worker_mirrored_strategy": (names.MULTI_WORKER, "tensorflow"),
    "torch_distributed": (names.TORCH_DISTRIBUTED, "pytorch"),
    "pytorchddp": (names.TORCH_DDP, "pytorch"),
}
_KINDS = ("smdistributed", "mpi", *_STARTERS, "instance_groups")


def read(
    given: Mapping[str, Any] | None, framework: Framework, instance_count: int, instance_type: str
) -> dict[str, Any]:
    """Checks a strategy; returns the hyperparameters that hand it on.

    Raises:
        ConfigError: it breaks rules; lists every problem that one look finds.
        UnsupportedError: this version does not offer what it asks for.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"distribution must be a dictionary; got {describe(given)}: leave it out, or give "
            '{"mpi": {"enabled": True, "processes_per_host": 2}}.'
        )
    if unknown := [key for key in given if key not in _KINDS]:
        raise ConfigError("\n".join(unknown_key(key, _KINDS, "distribution.") for key in unknown))
    if given.get("instance_groups"):
        raise UnsupportedError("distribution.instance_groups is not offered: all hosts are one.")
    given = _as_documented(given)
    problems: list[str] = []
    distributed = given.get("smdistributed")
    _refuse_data_parallel_alone(distributed)
    starter = _starter(given, framework, problems)
    parameters = {}
    if distributed:
        inner = {"smdistributed": distributed}
        if starter is None:
            # Without the key the rule that model parallelism needs MPI would not be looked at.
            inner["mpi"] = given.get("mpi") or {}
        parameters = read_given(inner, problems)
    mpi = _mpi(given.get("mpi"), problems)
    if starter is not None and mpi.get("enabled"):
        problems.append(f"distribution: mpi and {starter} exclude each other: keep one of them.")
    if problems:
        raise ConfigError("\n".join(problems))
    if starter is not None:
        written, processes = _started_otherwise(starter, given[starter], instance_type)
    elif mpi.get("enabled"):
        processes = int(mpi.get("processes_per_host") or machines.num_gpus(instance_type) or 1)
        _check_devices(processes, instance_type)
        options = mpi.get("custom_mpi_options") or ""
        mpi_options.translate(options)
        written = {
            names.MPI_ENABLED: True,
            names.MPI_OPTIONS: options,
        }
        if mpi.get("processes_per_host"):
            written[names.MPI_PROCESSES] = processes
    else:
        return {}
    if parameters:
        settings.check(
            framework,
            {LAUNCH_VARIABLE: json.dumps(parameters)},
            processes * instance_count,
            processes,
        )
        written[names.MP_PARAMETERS] = parameters
    if distributed:
        written[names.DATA_PARALLEL] = False
        written[names.INSTANCE_TYPE] = instance_type
    return written


def _as_documented(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a strategy with ``mpi.processes_per_host`` under that name.

    Compatibility: the documentation of the service, and a notebook that it publishes, also spell it
    ``process_per_host``.
    """
    mpi = given.get("mpi")
    if not isinstance(mpi, Mapping) or _ALSO not in mpi or "processes_per_host" in mpi:
        return given
    renamed = {"processes_per_host" if key == _ALSO else key: value for key, value in mpi.items()}
    return {**given, "mpi": renamed}


def check_world(values: Mapping[str, Any], framework: Framework, instance_count: int) -> None:
    """Checks that hyperparameters start as many processes as the model's partitions need.

    Args:
        values: all hyperparameters of a job.
        framework: of its script.
        instance_count: its hosts.

    Raises:
        ConfigError: they do not, or a parameter breaks a rule.
    """
    parameters = values.get(names.MP_PARAMETERS)
    if not isinstance(parameters, Mapping) or not parameters:
        return
    variables = {LAUNCH_VARIABLE: json.dumps(parameters)}
    is_joined = values.get(names.MPI_ENABLED)
    has_starter = any(values.get(name) for name, _ in _STARTERS.values())
    if is_joined or has_starter:
        processes = values.get(names.MPI_PROCESSES if is_joined else names.TORCH_PROCESSES)
        # Else it is one for each GPU, which those who run the job know.
        if processes:
            settings.check(framework, variables, int(processes) * instance_count, int(processes))
        return
    # A shell may start the processes of its host itself.
    is_script = not str(values.get(names.PROGRAM)).endswith(".sh") and names.COMMAND not in values
    if instance_count > 1 and is_script:
        try:
            settings.check(framework, variables, 1, 1)
        except ConfigError as error:
            raise ConfigError(
                f"{names.MP_PARAMETERS} need a distribution that joins the hosts; got none: each "
                f"of the {instance_count} hosts runs the script alone, and {error}\nGive them as "
                "distribution={'smdistributed': {'modelparallel': {'enabled': True, 'parameters': "
                "...}}, 'mpi': {'enabled': True, 'processes_per_host': ...}}."
            ) from None


def of_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the strategy that hyperparameters hand on, for an estimator that attaches."""
    for kind, (name, _) in _STARTERS.items():
        if values.get(name):
            return {kind: {"enabled": True}}
    if not values.get(names.MPI_ENABLED):
        return None
    mpi = {
        "enabled": True,
        "processes_per_host": values.get(names.MPI_PROCESSES, 1),
        "custom_mpi_options": values.get(names.MPI_OPTIONS, ""),
    }
    if names.MP_PARAMETERS not in values:
        return {"mpi": mpi}
    parallel = {"enabled": True, "parameters": values[names.MP_PARAMETERS]}
    return {"smdistributed": {"modelparallel": parallel}, "mpi": mpi}


def _is_enabled(part: Any) -> bool:
    return bool(part.get("enabled", True)) if isinstance(part, Mapping) else part is not None


def _starter(given: Mapping[str, Any], framework: Framework, problems: list[str]) -> str | None:
    """Returns the way to start the processes that is asked for beside MPI."""
    asked = [kind for kind in _STARTERS if kind in given and _is_enabled(given[kind])]
    for kind in asked:
        owner = _STARTERS[kind][1]
        if owner != framework:
            problems.append(f"distribution.{kind} is for {owner}; got it for {framework}.")
    if len(asked) > 1:
        problems.append(f"distribution: {' and '.join(asked)} exclude each other: keep one.")
    parallel = isinstance(given.get("smdistributed"), Mapping) and given["smdistributed"]
    if asked and parallel and _STARTERS[asked[0]][1] == "tensorflow":
        problems.append(f"distribution: smdistributed needs mpi; got {asked[0]}.")
    return asked[0] if asked else None


def _started_otherwise(
    starter: str, part: Mapping[str, Any], instance_type: str
) -> tuple[dict[str, Any], int]:
    """Returns the hyperparameters of a starter, and its processes on each host."""
    written: dict[str, Any] = {_STARTERS[starter][0]: True}
    processes = part.get("processes_per_host")
    if processes is not None:
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
            raise ConfigError(
                f"distribution.{starter}.processes_per_host must be an integer of at least 1; got "
                f"{describe(processes)}."
            )
        _check_devices(processes, instance_type)
        written[names.TORCH_PROCESSES] = processes
    return written, processes or machines.num_gpus(instance_type) or 1


def _refuse_data_parallel_alone(part: Any) -> None:
    """Refuses the other library, unless both are asked for, which another rule forbids."""
    inner = part if isinstance(part, Mapping) else {}
    data_parallel = inner.get("dataparallel")
    if data_parallel and _is_enabled(data_parallel) and not inner.get("modelparallel"):
        raise UnsupportedError(
            "distribution.smdistributed.dataparallel is another library, which is not offered: use "
            'modelparallel with "ddp": True and "partitions": 1.'
        )


def _mpi(part: Any, problems: list[str]) -> Mapping[str, Any]:
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        problems.append(f"distribution.mpi must be a dictionary; got {describe(part)}.")
        return {}
    for key in part:
        if key not in _MPI_KEYS:
            problem = unknown_key(key, _MPI_KEYS, "distribution.mpi.")
            if not any(f"mpi.{key} " in known for known in problems):
                problems.append(problem)
    count = part.get("processes_per_host", 1)
    whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
    if not whole and not any("processes_per_host" in known for known in problems):
        problems.append(
            f"distribution.mpi.processes_per_host must be an integer of at least 1; got "
            f"{describe(count)}."
        )
    return part


def _check_devices(processes: int, instance_type: str) -> None:
    gpus = machines.num_gpus(instance_type)
    if gpus and processes > gpus:
        raise ConfigError(
            f"mpi.processes_per_host must not exceed the GPUs of a host; got {processes}, and "
            f"{instance_type} has {gpus}: lower it, or choose a larger type."
        )
