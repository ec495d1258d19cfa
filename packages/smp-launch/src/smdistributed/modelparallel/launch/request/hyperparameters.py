"""How hyperparameters are written into the document, and read from it.

Each value is JSON, as the estimators of the service write them. Those that begin with
``sagemaker_`` are for whoever runs the script; the script gets all others.

Source: estimator interface, section 3 (hand-over) and section 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError

FRAMEWORK_PREFIX = "sagemaker_"
PROGRAM = "sagemaker_program"
SUBMIT_DIRECTORY = "sagemaker_submit_directory"
LOG_LEVEL = "sagemaker_container_log_level"
JOB_NAME = "sagemaker_job_name"
REGION = "sagemaker_region"
MPI_ENABLED = "sagemaker_mpi_enabled"
MPI_PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
MPI_OPTIONS = "sagemaker_mpi_custom_mpi_options"
MP_PARAMETERS = "mp_parameters"
DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"
PARAMETER_SERVER = "sagemaker_parameter_server_enabled"
MULTI_WORKER = "sagemaker_multi_worker_mirrored_strategy_enabled"
TORCH_DISTRIBUTED = "sagemaker_torch_distributed_enabled"
TORCH_DDP = "sagemaker_pytorch_ddp_enabled"
#: Ours: processes of torchrun on each host, where GPUs do not say it.
TORCH_PROCESSES = "sagemaker_torch_distributed_processes_per_host"
INSTANCE_TYPE = "sagemaker_instance_type"
#: Ours, for jobs of ``ModelTrainer``: the driver that its container would run and what it is told,
#: a command in place of a script, and the file that lists what the script needs.
DRIVER = "sagemaker_driver"
DRIVER_CONFIG = "sagemaker_driver_config"
COMMAND = "sagemaker_command"
REQUIREMENTS = "sagemaker_requirements"


#: For whoever runs the script too, but with variables of their own.
_INTERNAL = (
    *(PROGRAM, SUBMIT_DIRECTORY, LOG_LEVEL, JOB_NAME, REGION, "sagemaker_s3_output"),
    "sagemaker_enable_cloudwatch_metrics",
)


def checked(values: Any) -> dict[str, Any]:
    """Returns hyperparameters as they were given, by name; none for None.

    Raises:
        ConfigError: they have no names.
    """
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(
            "hyperparameters must be a dictionary of values by their names, such as "
            f"{{'epochs': 3}}; got {type(values).__name__} {values!r}: give each value a name."
        )
    return dict(values or {})


def encode(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns each value as JSON.

    Raises:
        ConfigError: a name is no text, or a value has no form in JSON.
    """
    encoded = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(
                f"the name of a hyperparameter must be a text; got {name!r}: rename it."
            )
        try:
            encoded[name] = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a hyperparameter must be a number, a text, a truth value, a list or a dictionary "
                f"of such; {name} is {type(value).__name__} ({error}): convert it first."
            ) from None
    return encoded


def decode(written: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values; what is not JSON is a text, as documents written by hand have it."""
    decoded: dict[str, Any] = {}
    for name, text in written.items():
        try:
            decoded[name] = json.loads(text)
        except ValueError:
            decoded[name] = text
    return decoded


def of_script(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those that the script gets."""
    return {name: v for name, v in values.items() if not name.startswith(FRAMEWORK_PREFIX)}


def of_framework(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those that are for whoever runs the script, and have no variable of their own."""
    return {
        name: value
        for name, value in values.items()
        if name.startswith(FRAMEWORK_PREFIX) and name not in _INTERNAL
    }
