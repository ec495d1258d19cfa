"""The configuration that smprun hands to the job: merged key by key, and checked.

Source: model-parallel-sm-sdk.md, Configuration parameters; smd_model_parallel_general.rst,
Parameters for mpi.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from smdistributed.modelparallel.common.config import Config, Framework, load
from smdistributed.modelparallel.common.config.schema import Text, names
from smdistributed.modelparallel.common.config.source import (
    LAUNCH_VARIABLE,
    read_given,
    read_launch,
)
from smdistributed.modelparallel.common.errors import ConfigError

#: What a script may well add in smp.init; with it, only certain mistakes remain.
_STAND_INS: Mapping[Framework, Mapping[str, object]] = {
    "pytorch": {"pipeline_parallel_degree": 1, "ddp": True},
    "tensorflow": {"pipeline_parallel_degree": 1},
}


@dataclass(frozen=True)
class ConfigFile:
    """What a configuration file says.

    Attributes:
        parameters: the parameters of the library, without an envelope.
        processes_per_host: of the envelope's ``mpi`` part, or None.
        custom_mpi_options: of the same.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    processes_per_host: int | None = None
    custom_mpi_options: str = ""


@dataclass(frozen=True)
class Merged:
    """The parameters of all sources.

    Attributes:
        parameters: by the spelling that the user chose.
        sources: main name of each parameter -> where its value comes from, in words.
    """

    parameters: Mapping[str, Any]
    sources: Mapping[str, str]


def read_config_file(path: str) -> ConfigFile:
    """Reads a YAML or JSON file, with or without the envelope of a launching script.

    Raises:
        ConfigError: the file cannot be read, or its envelope breaks a rule; lists every problem.
    """
    problems: list[str] = []
    parameters = read_given(path, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    document = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    mpi = document.get("mpi", {}) if "smdistributed" in document else {}
    return ConfigFile(
        parameters, mpi.get("processes_per_host"), mpi.get("custom_mpi_options") or ""
    )


def parse_setting(text: str) -> tuple[str, Any]:
    """Reads ``key=value``; the value is a number, a truth value or a list if it looks like one.

    Raises:
        ConfigError: there is no key or no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value; received {text!r}: write --set microbatches=4.")
    return key.strip(), _typed(value)


def merge(
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    settings: Iterable[tuple[str, Any]],
) -> Merged:
    """Returns the parameters of all sources; a later source wins, parameter by parameter.

    Args:
        environ: the caller's environment, for what it inherited.
        file: parameters of the configuration file.
        settings: those of ``--set``.

    Raises:
        ConfigError: the inherited value cannot be read.
    """
    problems: list[str] = []
    inherited = read_launch(environ, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    inherited = {k: _typed(v) if isinstance(v, Text) else v for k, v in inherited.items()}
    main_names = names(Config)
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, given in (
        (LAUNCH_VARIABLE, inherited),
        ("--config", file),
        ("--set", dict(settings)),
    ):
        # One source may hold two spellings of a parameter: that is for the check to find.
        main = {main_names.get(key, key) for key in given}
        merged = {k: v for k, v in merged.items() if main_names.get(k, k) not in main}
        merged.update(given)
        sources.update(dict.fromkeys(main, source))
    return Merged(merged, sources)


def launch_environment(environ: Mapping[str, str], merged: Merged) -> dict[str, str]:
    """Returns ``environ`` with the parameters in it, as the library reads them."""
    if not merged.parameters:
        return dict(environ)
    return {**environ, LAUNCH_VARIABLE: json.dumps(dict(merged.parameters))}


def changed(environ: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns ``environ`` with further parameters in it, which win over those that it has."""
    return launch_environment(environ, merge(environ, {}, parameters.items()))


def check(
    framework: Framework,
    environ: Mapping[str, str],
    num_ranks: int,
    processes_per_host: int | None,
) -> tuple[Config, str | None]:
    """Checks the configuration as far as it is known before the script runs.

    The script may add parameters in ``smp.init``. What it could still put right is a remark, the
    rest an error.

    Returns:
        The configuration without the script's part, and the remark or None.

    Raises:
        ConfigError: no script can run with this; lists every problem.
    """
    if not environ.get(LAUNCH_VARIABLE):
        return load(framework, environ=environ), None
    try:
        config = load(framework, environ=environ)
        config.check_world(num_ranks, framework, processes_per_host)
    except ConfigError as error:
        try:
            config = load(framework, _STAND_INS[framework], environ)
            config.check_world(num_ranks, framework, processes_per_host)
        except ConfigError:
            raise error from None
        return config, f"unless smp.init in the script adds what is missing: {error}"
    return config, None


def _typed(text: str) -> Any:
    for read in (json.loads, yaml.safe_load):  # YAML alone takes 5e8 for a text
        try:
            return read(text)
        except (ValueError, RecursionError, yaml.YAMLError):
            continue
    return str(text)
