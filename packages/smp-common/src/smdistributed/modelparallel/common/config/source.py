"""Where parameters come from: the launcher's environment variable, a dict, a file.

Everything here returns plain dicts as the user wrote them; what the keys mean is not known here,
except for the envelope that a launcher's configuration puts around the parameters.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

from smdistributed.modelparallel.common.config.schema import (
    Bool,
    ConfigWarning,
    Parameter,
    PositiveInt,
    Settings,
    Text,
    check_values,
    describe,
    unknown_key,
)

LAUNCH_VARIABLE = "SM_HP_MP_PARAMETERS"
_SDK = "model-parallel-sm-sdk.md, Configuration parameters"
_PATH = "smdistributed.modelparallel."
_SHOWN_LENGTH = 400
#: In place of parameters, asks for a plan.
_AUTO = "auto"


class Envelope(Settings):
    """What a launcher's configuration puts around the parameters."""

    enabled: Annotated[
        Bool, Parameter("Switch model parallelism on for the job.", since="1.1", source=_SDK)
    ]
    parameters: Annotated[
        dict[Any, Any],
        Parameter("The parameters of model parallelism.", since="1.1", source=_SDK),
    ]


def _check_quoting(options: str) -> str:
    shlex.split(options)
    return options


class Mpi(Settings):
    """How a launcher starts the processes."""

    enabled: Annotated[
        Bool,
        Parameter(
            "Start the job through MPI, as model parallelism needs.",
            since="1.1",
            source="smd_model_parallel_general.rst, Parameters for mpi",
        ),
    ]
    processes_per_host: Annotated[
        PositiveInt,
        Parameter(
            "Processes started on each host, one for each accelerator.",
            since="1.1",
            source="smd_model_parallel_general.rst, Parameters for mpi",
        ),
    ]
    custom_mpi_options: Annotated[
        str,
        AfterValidator(_check_quoting),
        Parameter(
            "More flags of mpirun, for example -x NAME=VALUE.",
            since="1.1",
            source=_SDK,
            allowed="flags of mpirun, quoted as in a shell",
        ),
    ] = "--mca btl_vader_single_copy_mechanism none"


class _YamlLoader(yaml.SafeLoader):
    """YAML in which 5e8 is a number: YAML 1.1 alone wants a point in it and reads a text."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_launch(environ: Mapping[str, str], problems: list[str]) -> dict[Any, Any]:
    """The parameters that the launcher handed over: JSON, or a list ``ddp=True,microbatches=4``."""
    text = environ.get(LAUNCH_VARIABLE, "").strip()
    if not text:
        return {}
    if not text.startswith("{"):
        pairs = [item.partition("=") for item in text.split(",")]
        if all(separator for _, separator, _ in pairs):
            return {name.strip(): Text(value.strip()) for name, _, value in pairs}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        got = text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
        problems.append(f"{LAUNCH_VARIABLE} must be a JSON object: {error}; got {got!r}.")
        return {}
    return _expect_mapping(document, LAUNCH_VARIABLE, problems)


def read_given(
    given: Mapping[str, object] | str | os.PathLike[str] | None, problems: list[str]
) -> dict[Any, Any]:
    """The parameters in what the script gave: a dict or a YAML or JSON file, without envelope."""
    if given is None:
        return {}
    if isinstance(given, (str, os.PathLike)):
        document = _read_file(Path(given), problems)
    else:
        document = _expect_mapping(given, "the configuration", problems)
    return _unwrap(document, problems)


def _read_file(path: Path, problems: list[str]) -> dict[Any, Any]:
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            document = json.loads(content)
        else:
            document = yaml.load(content, _YamlLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"the configuration file {path} cannot be read as YAML or JSON: {error}.")
        return {}
    return {} if document is None else _expect_mapping(document, str(path), problems)


def _expect_mapping(value: object, what: str, problems: list[str]) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    problems.append(f"{what} must be a dictionary of parameters; got {describe(value)}.")
    return {}


def _unwrap(document: dict[Any, Any], problems: list[str]) -> dict[Any, Any]:
    if not document.keys() & {"smdistributed", *Envelope.model_fields}:
        return document
    distributed = document
    if "smdistributed" in document:
        for key in document.keys() - {"smdistributed", "mpi"}:
            problems.append(unknown_key(key, ("smdistributed", "mpi")))
        distributed = _expect_mapping(document["smdistributed"], "smdistributed", problems)
    envelope, path = _find_envelope(distributed, problems)
    if envelope.get("parameters") == _AUTO:
        envelope = {**envelope, "parameters": {_AUTO: True}}
    problems += check_values(Envelope, envelope, path=path).values()
    if envelope.get("enabled") is not True:
        return {}
    if "mpi" in document:
        _check_mpi(_expect_mapping(document["mpi"], "mpi", problems), problems)
    parameters = envelope.get("parameters")
    return dict(parameters) if isinstance(parameters, Mapping) else {}


def _find_envelope(distributed: dict[Any, Any], problems: list[str]) -> tuple[dict[Any, Any], str]:
    """The envelope and its path, from the nested form or from the flat one."""
    if "modelparallel" not in distributed and distributed.keys() & Envelope.model_fields.keys():
        warnings.warn(
            "enabled and parameters belong under smdistributed.modelparallel; they are accepted "
            "without that level.",
            ConfigWarning,
            stacklevel=2,
        )
        return {key: value for key, value in distributed.items() if key != "mpi"}, ""
    for key in distributed.keys() - {"modelparallel", "dataparallel"}:
        known = ("modelparallel", "dataparallel")
        problems.append(unknown_key(key, known, "smdistributed."))
    envelope = _expect_mapping(distributed.get("modelparallel", {}), _PATH[:-1], problems)
    data_parallel = distributed.get("dataparallel")
    rival = isinstance(data_parallel, Mapping) and data_parallel.get("enabled") is True
    if rival and envelope.get("enabled") is True:
        problems.append(
            f"{_PATH}enabled and smdistributed.dataparallel.enabled exclude each other: set one "
            "of them to false. Got true for both."
        )
    return envelope, _PATH


def _check_mpi(mpi: dict[Any, Any], problems: list[str]) -> None:
    wrong = check_values(Mpi, mpi, path="mpi.")
    needed = ("enabled", "processes_per_host")
    absent = [key for key in needed if mpi.get(key) is None or mpi[key] is False]
    if absent:
        problems.append(
            f"{_PATH}enabled needs mpi.enabled true and mpi.processes_per_host; got "
            f"{', '.join(f'mpi.{key} {mpi.get(key)!r}' for key in absent)}."
        )
    problems += [text for key, text in wrong.items() if key not in absent]
