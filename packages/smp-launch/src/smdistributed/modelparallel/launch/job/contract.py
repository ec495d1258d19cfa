"""What a script sees: its files, variables and arguments, as pure functions of the document.

The judge is the training toolkit that runs scripts in the service's containers: given the same
folder, variables and arguments are equal, but for what ``docs/reference/launch.md`` lists.

Source: estimator interface, section 4.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.gpus import usable_gpus
from smdistributed.modelparallel.launch.channels.file import is_dealt
from smdistributed.modelparallel.launch.job import trainer
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.request import hyperparameters as names
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.document import Channel, TrainingJob
from smdistributed.modelparallel.launch.request.naming import parse_image

_GROUP = "homogeneousCluster"
_INTERFACE = "lo"


@dataclass(frozen=True)
class Host:
    """A host as the job knows it.

    Attributes:
        name: ``algo-1`` and so on.
        all_names: of all hosts.
        num_cpus: of this machine.
        num_gpus: that its processes may use.
        own_gpus: which of this machine's these are, for ``CUDA_VISIBLE_DEVICES``; None for all.
    """

    name: str
    all_names: tuple[str, ...]
    num_cpus: int
    num_gpus: int
    own_gpus: tuple[str, ...] | None = None


def host_names(count: int) -> tuple[str, ...]:
    """Returns the names of the hosts of a job."""
    return tuple(f"algo-{index + 1}" for index in range(count))


def hosts(count: int, gpus: Sequence[str], *, share_a_machine: bool) -> list[Host]:
    """Returns the hosts of a job.

    Args:
        count: how many.
        gpus: of this machine, see ``usable_gpus``.
        share_a_machine: whether they are parts of this machine; its GPUs are then shared out
            evenly, and the rest is of no use.
    """
    names, num_cpus = host_names(count), os.cpu_count() or 1
    if count == 1 or not share_a_machine or not gpus:
        return [Host(name, names, num_cpus, len(gpus)) for name in names]
    share = len(gpus) // count
    return [
        Host(name, names, num_cpus, share, tuple(gpus[index * share : (index + 1) * share]))
        for index, name in enumerate(names)
    ]


def check_machine(kind: str) -> None:
    """Checks a type of host.

    Raises:
        ConfigError: nobody knows it, or it needs GPUs that are not here.
    """
    machines.check(kind)
    if kind == machines.LOCAL_GPU and not usable_gpus():
        raise ConfigError(
            "instance_type 'local_gpu' needs a GPU that processes may use; this machine has none: "
            "use 'local'."
        )


def values(folder: JobFolder, request: TrainingJob) -> dict[str, Any]:
    """Returns the hyperparameters; paths of a container are those of the folder."""
    decoded = names.decode(request.hyper_parameters)
    return {key: folder.inside(v) if isinstance(v, str) else v for key, v in decoded.items()}


def arguments(all_values: Mapping[str, Any]) -> list[str]:
    """Returns the script's arguments: ``--name value``, sorted; a dictionary as ``a=1,b=2``.

    Those of a ``ModelTrainer`` are as it writes them.
    """
    user = names.of_script(all_values)
    if names.DRIVER in all_values:
        return trainer.arguments(user)
    words = []
    for name, value in sorted(user.items()):
        if isinstance(value, Mapping):
            value = ",".join(f"{key}={item}" for key, item in sorted(value.items()))
        dashes = "--" if len(name) > 1 else "-"
        words += [f"{dashes}{name}", "" if value is None else str(value)]
    return words


def config_files(request: TrainingJob, host: Host) -> dict[str, Any]:
    """Returns the files of ``input/config``: name -> content."""
    return {
        "hyperparameters.json": request.hyper_parameters,
        "inputdataconfig.json": _input_data_config(request),
        "resourceconfig.json": _resource_config(request, host),
    }


def environment(folder: JobFolder, request: TrainingJob, host: Host) -> dict[str, str]:
    """Returns the variables that the script gets beside those of the user's own environment."""
    all_values = values(folder, request)
    user = names.of_script(all_values)
    training = _training_environment(folder, request, host, all_values)
    fixed: dict[str, Any] = {
        "SM_HOSTS": host.all_names,
        "SM_CURRENT_HOST": host.name,
        "SM_CURRENT_INSTANCE_TYPE": training["current_instance_type"],
        "SM_CURRENT_INSTANCE_GROUP": _GROUP,
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": host.all_names,
        "SM_INSTANCE_GROUPS": training["instance_groups"],
        "SM_INSTANCE_GROUPS_DICT": training["instance_groups_dict"],
        "SM_DISTRIBUTION_INSTANCE_GROUPS": [],
        "SM_IS_HETERO": False,
        "SM_NETWORK_INTERFACE_NAME": _INTERFACE,
        "SM_NUM_CPUS": host.num_cpus,
        "SM_NUM_GPUS": host.num_gpus,
        "SM_NUM_NEURONS": 0,
        "SM_HPS": user,
        "SM_USER_ARGS": arguments(all_values),
        "SM_USER_ENTRY_POINT": training["user_entry_point"],
        "SM_MODULE_NAME": training["module_name"],
        "SM_MODULE_DIR": training["module_dir"],
        "SM_FRAMEWORK_MODULE": training["framework_module"],
        "SM_FRAMEWORK_PARAMS": names.of_framework(all_values),
        "SM_LOG_LEVEL": training["log_level"],
        "SM_MODEL_DIR": training["model_dir"],
        "SM_OUTPUT_DIR": training["output_dir"],
        "SM_OUTPUT_DATA_DIR": training["output_data_dir"],
        "SM_OUTPUT_INTERMEDIATE_DIR": training["output_intermediate_dir"],
        "SM_INPUT_DIR": training["input_dir"],
        "SM_INPUT_CONFIG_DIR": training["input_config_dir"],
        "SM_INPUT_DATA_CONFIG": training["input_data_config"],
        "SM_RESOURCE_CONFIG": training["resource_config"],
        "SM_CHANNELS": sorted(training["channel_input_dirs"]),
        "SM_TRAINING_ENV": training,
        "SM_JOB_NAME": request.training_job_name,
        "TRAINING_JOB_NAME": request.training_job_name,
        "CURRENT_HOST": host.name,
        "SAGEMAKER_JOB_NAME": request.training_job_name,
        "SAGEMAKER_REGION": all_values.get(names.REGION, ""),
    }
    fixed.update(
        (f"SM_CHANNEL_{name.upper()}", path)
        for name, path in training["channel_input_dirs"].items()
    )
    if names.DRIVER in all_values:
        fixed |= trainer.variables(
            all_values, folder.data, folder.output, host.all_names, host.name
        )
    if host.own_gpus is not None:
        fixed["CUDA_VISIBLE_DEVICES"] = ",".join(host.own_gpus)
    fixed.update((f"SM_HP_{name.upper()}", value) for name, value in user.items())
    given = {key: folder.inside(text) for key, text in request.environment.items()}
    if given.get("TF_DISABLE_MKL") == "1":
        # What TensorFlow calls it today.
        given.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    return {**{name: _as_text(value) for name, value in fixed.items()}, **given}


def differing(
    folder: JobFolder, request: TrainingJob, all_hosts: Sequence[Host]
) -> dict[str, dict[str, str]]:
    """Returns the variables that are otherwise on a host than on the first one, by its name.

    ``SM_CURRENT_HOST`` and what repeats it are left to who starts the processes.
    """
    first, *others = all_hosts
    found: dict[str, dict[str, str]] = {}
    for channel in request.input_data_config:
        shared = channel_base(folder, request, channel, first.name)
        for host in others:
            base = channel_base(folder, request, channel, host.name)
            if base != shared:
                own = found.setdefault(host.name, {})
                own[f"SM_CHANNEL_{channel.channel_name.upper()}"] = str(base)
    for rank, host in enumerate(others, 1):
        own = found.setdefault(host.name, {})
        if host.own_gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(host.own_gpus)
        if names.DRIVER in request.hyper_parameters:
            own["SM_CURRENT_HOST_RANK"] = str(rank)
    return {name: own for name, own in found.items() if own}


def _training_environment(
    folder: JobFolder, request: TrainingJob, host: Host, all_values: Mapping[str, Any]
) -> dict[str, Any]:
    program = str(all_values.get(names.PROGRAM, ""))
    resources = _resource_config(request, host)
    groups = resources["instance_groups"]
    framework = parse_image(request.algorithm_specification.training_image or "").framework
    return {
        "additional_framework_parameters": names.of_framework(all_values),
        "channel_input_dirs": {
            channel.channel_name: str(channel_base(folder, request, channel, host.name))
            for channel in request.input_data_config
        },
        "current_host": host.name,
        "current_instance_group": _GROUP,
        "current_instance_group_hosts": host.all_names,
        "current_instance_type": resources["current_instance_type"],
        "distribution_hosts": [],
        "distribution_instance_groups": [],
        "framework_module": f"sagemaker_{framework}_container.training:main" if framework else None,
        "hosts": host.all_names,
        "hyperparameters": names.of_script(all_values),
        "input_config_dir": str(folder.config),
        "input_data_config": _input_data_config(request),
        "input_dir": str(folder.path / "input"),
        "instance_groups": [_GROUP],
        "instance_groups_dict": {group["instance_group_name"]: group for group in groups},
        "is_hetero": False,
        "is_master": host.name == host.all_names[0],
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": False,
        "job_name": request.training_job_name,
        "log_level": all_values.get(names.LOG_LEVEL, 20),
        "master_hostname": host.all_names[0],
        "model_dir": str(folder.model),
        "module_dir": all_values.get(names.SUBMIT_DIRECTORY, str(folder.code)),
        "module_name": program.removesuffix(".py"),
        "network_interface_name": _INTERFACE,
        "num_cpus": host.num_cpus,
        "num_gpus": host.num_gpus,
        "num_neurons": 0,
        "output_data_dir": str(folder.output / "data"),
        "output_dir": str(folder.output),
        "output_intermediate_dir": str(folder.output / "intermediate"),
        "resource_config": resources,
        "topology": [],
        "user_entry_point": program,
    }


def _resource_config(request: TrainingJob, host: Host) -> dict[str, Any]:
    instance_type = request.resource_config.instance_type or "local"
    group = {
        "instance_group_name": _GROUP,
        "instance_type": instance_type,
        "hosts": list(host.all_names),
    }
    return {
        "current_host": host.name,
        "current_instance_type": instance_type,
        "current_group_name": _GROUP,
        "hosts": list(host.all_names),
        "instance_groups": [group],
        "network_interface_name": _INTERFACE,
    }


def mode_of(channel: Channel, request: TrainingJob) -> str:
    """Returns how a channel reaches the script."""
    return channel.input_mode or request.algorithm_specification.training_input_mode


def channel_base(folder: JobFolder, request: TrainingJob, channel: Channel, host: str) -> Path:
    """Returns the folder of a channel, or what its pipes' names begin with.

    Hosts share it where all have the same files; the first host has what the others would have.
    """
    is_own = is_dealt(channel) or mode_of(channel, request) == "Pipe"
    if not is_own or host == host_names(1)[0]:
        return folder.data / channel.channel_name
    return folder.path / "input/hosts" / host / channel.channel_name


def _input_data_config(request: TrainingJob) -> dict[str, Any]:
    found = {}
    for channel in request.input_data_config:
        source = channel.data_source
        dealt = "FullyReplicated"
        if source.s3_data_source is not None:
            dealt = source.s3_data_source.s3_data_distribution_type
        elif source.file_data_source is not None:
            dealt = source.file_data_source.file_data_distribution_type
        about = {
            "TrainingInputMode": mode_of(channel, request),
            "S3DistributionType": dealt,
            "RecordWrapperType": channel.record_wrapper_type or "None",
        }
        if channel.content_type:
            about["ContentType"] = channel.content_type
        found[channel.channel_name] = about
    return found


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
