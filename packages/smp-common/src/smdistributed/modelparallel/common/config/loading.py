"""The configuration: what the user asked for, checked, with every default resolved.

`load` merges what the launcher and the script say, finds every problem before it raises one
`ConfigError`, and returns a frozen `Config`. What depends on the number of processes is checked by
`Config.check_world`, since that number is known only in the job.

Source: smd_model_parallel_general.rst; model-parallel-sm-sdk.md, Configuration parameters.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from pydantic import PrivateAttr

from smdistributed.modelparallel.common.config.parameters import (
    UNDOCUMENTED,
    Environment,
    Parameters,
)
from smdistributed.modelparallel.common.config.rules import IDLE_RULES, RULES, broken
from smdistributed.modelparallel.common.config.schema import (
    ConfigWarning,
    Framework,
    Text,
    check_values,
    describe,
    names,
    parameter,
    unknown_key,
)
from smdistributed.modelparallel.common.config.source import read_given, read_launch
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.topology import Topology, describe_indivisible

__all__ = ["Config", "ConfigWarning", "Explained", "Framework", "load"]

_log = logging.getLogger(__name__)

_PURPOSES = (
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "sharded_data_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "ddp",
    "horovod",
    "auto",
)
#: Of parameters that both frameworks have, the words that TensorFlow knows.
_WORDS_OF_TENSORFLOW = {
    "placement_strategy": ("cluster", "spread"),
    "pipeline": ("interleaved", "simple"),
}
_TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}

Origin = Literal["launch", "init", "default"]


class Explained(NamedTuple):
    """One line of `Config.explain`."""

    name: str
    value: object
    source: Origin


class _Setting(NamedTuple):
    """A value as the user gave it."""

    value: object
    spelling: str
    origin: Origin


class Config(Parameters):
    """Every parameter, resolved; immutable, and equal on all processes of a job."""

    _spelled: dict[str, str] = PrivateAttr(default_factory=dict)
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _environment: Environment = PrivateAttr(default_factory=Environment)

    @property
    def partitions(self) -> int:
        """The older spelling of pipeline_parallel_degree."""
        return self.pipeline_parallel_degree

    @property
    def environment(self) -> Environment:
        """The environment variables of the library."""
        return self._environment

    def topology(self, size: int) -> Topology:
        """How a job of ``size`` processes is arranged.

        Raises:
            ConfigError: the degrees do not divide ``size``.
        """
        pp_size, tp_size = self.pipeline_parallel_degree, self.tensor_parallel_degree
        cp_size = self.context_parallel_degree
        if size % (pp_size * tp_size * cp_size):
            described = describe_indivisible(
                size,
                pp_size,
                tp_size,
                cp_size,
                pp_name=self._spelled.get("pipeline_parallel_degree", "pipeline_parallel_degree"),
            )
            _raise_if([described])
        return Topology(size, pp_size, tp_size, self.placement_strategy, cp_size)

    def check_world(
        self, size: int, framework: Framework, processes_per_host: int | None = None
    ) -> None:
        """Check what depends on the number of processes.

        Args:
            size: number of processes of the job.
            framework: the framework in use.
            processes_per_host: lets tensor-parallel groups that span hosts be warned about.

        Raises:
            ConfigError: the job cannot run with this many processes; lists every reason.
        """
        if self.auto:
            return  # a plan gives what is to be checked
        topology = self.topology(size)
        replicas, shard = topology.rdp_cp_size, self.sharded_data_parallel_degree
        problems = []
        if framework == "pytorch" and replicas > 1 and not self.ddp:
            problems.append(
                f"{size} processes hold {replicas} replicas of the model, which needs ddp: set it "
                f"to true, or start {topology.mp_size} processes. Got ddp False."
            )
        if replicas % shard:
            divisors = [str(n) for n in range(1, replicas + 1) if replicas % n == 0]
            problems.append(
                f"sharded_data_parallel_degree must divide the {replicas} ranks that hold the same "
                f"slices (rdp_size of {size} processes): use {', '.join(divisors)}; got {shard}."
            )
        if self.horovod and importlib.util.find_spec("horovod") is None:
            problems.append(
                "horovod true needs Horovod, which cannot be imported: install the package "
                "horovod built for TensorFlow and MPI, or set horovod to false."
            )
        _raise_if(problems)
        if framework == "tensorflow" and replicas > 1 and not self.horovod:
            _warn(
                f"{size} processes hold {replicas} replicas of the model and horovod is false: "
                "gradients are not averaged unless the script does it."
            )
        if processes_per_host is not None:
            _warn_about_tensor_groups(topology, processes_per_host)

    def given(self) -> dict[str, object]:
        """Every parameter that somebody has given, by its main name."""
        return {each.name: each.value for each in self.explain() if each.source != "default"}

    def explain(self) -> list[Explained]:
        """Every parameter with its value and where that came from."""
        origins = dict.fromkeys(self.model_fields_set, "init") | self._origins
        return [
            Explained(name, getattr(self, name), origins.get(name, "default"))  # type: ignore[arg-type]
            for name in type(self).model_fields
        ]


def load(
    framework: Framework,
    given: Mapping[str, object] | str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Read, merge and check the configuration.

    What the launcher handed over (SM_HP_MP_PARAMETERS) beats ``given``, which beats the defaults,
    parameter by parameter. With neither, the result describes one plain process.

    Args:
        framework: the framework in use.
        given: a dict of parameters or the path of a YAML or JSON file, with or without the
            envelope of a launcher's configuration.
        environ: the environment variables.

    Raises:
        ConfigError: lists every problem found.
    """
    problems: list[str] = []
    settings = {
        **_recognise(read_given(given, problems), framework, "init", problems),
        **_recognise(read_launch(environ, problems), framework, "launch", problems),
    }
    if settings and not settings.keys() & set(_PURPOSES):
        asked = ", ".join(setting.spelling for setting in settings.values())
        problems.append(
            f"the configuration sets {asked} but asks for no parallelism: set at least one of "
            f"{', '.join(_PURPOSES)}."
        )
    if "expert_parallel_degree" in settings:
        # The ranks that have experts between them are those that split modules.
        settings.setdefault("tensor_parallel_degree", settings["expert_parallel_degree"])
    values = {name: setting.value for name, setting in settings.items()}
    spelled = {name: setting.spelling for name, setting in settings.items()}
    wrong = check_values(Config, values, spelled=spelled)
    # The rest is built even so, to find the rules that are broken besides.
    config = Config.model_validate({n: v for n, v in values.items() if n not in wrong})
    problems += dict.fromkeys(wrong.values())
    problems += broken(RULES, config, spelled, skip=wrong)
    problems += _check_framework(config, framework, spelled)

    variables = _read_variables(environ) if framework == "pytorch" else {}
    problems += check_values(Environment, variables).values()
    _raise_if(problems)

    for text in broken(IDLE_RULES, config, spelled):
        _warn(text)
    config._spelled = spelled
    config._origins = {name: setting.origin for name, setting in settings.items()}
    config._environment = Environment.model_validate(variables)
    return config


def takes(framework: Framework, name: str, value: object = None) -> bool:
    """Whether a framework has a parameter, and the parameter this word.

    Args:
        framework: of a job.
        name: main name of the parameter.
        value: a word of its; None for any.
    """
    if framework not in parameter(Config.model_fields[name]).frameworks:
        return False
    known = _WORDS_OF_TENSORFLOW.get(name) if framework == "tensorflow" else None
    return value is None or known is None or value in known


def _recognise(
    raw: Mapping[object, object], framework: Framework, origin: Origin, problems: list[str]
) -> dict[str, _Setting]:
    """The settings of one source under their main names, without those that are not set."""
    known = names(Config)
    own = [s for s, n in known.items() if framework in parameter(Config.model_fields[n]).frameworks]
    settings: dict[str, _Setting] = {}
    for key, value in raw.items():
        name = known.get(key) if isinstance(key, str) else None
        if name is None:
            if isinstance(key, str) and key.startswith("_"):
                _log.info("%s is accepted and has no effect", key)
            else:
                problems.append(unknown_key(key, own))
            continue
        if value is None or (isinstance(value, Text) and value.lower() in ("", "none", "null")):
            continue
        if name in UNDOCUMENTED:
            _log.info("%s is accepted for the sake of existing scripts", name)
        if key not in own and not (name == "tensor_parallel_degree" and value in (1, "1")):
            other = " and ".join(
                _TITLES[f] for f in parameter(Config.model_fields[name]).frameworks
            )
            problems.append(
                f"{key} is a parameter of {other} only, and this is {_TITLES[framework]}: remove "
                f"it; got {describe(value)}."
            )
            continue
        if name in settings and settings[name].value != value:
            problems.append(
                f"{settings[name].spelling} and {key} name one value: keep one of them; got "
                f"{describe(settings[name].value)} and {describe(value)}."
            )
            continue
        settings[name] = _Setting(value, str(key), origin)
    return settings


def _check_framework(
    config: Config, framework: Framework, spelled: Mapping[str, str]
) -> Iterable[str]:
    if framework != "tensorflow":
        return
    for name, known in _WORDS_OF_TENSORFLOW.items():
        value = getattr(config, name)
        if value not in known:
            yield (
                f"{spelled.get(name, name)} must be one of {', '.join(known)} under TensorFlow; "
                f"got {describe(value)}."
            )


def _read_variables(environ: Mapping[str, str]) -> dict[str, object]:
    return {name: Text(environ[name]) for name in Environment.model_fields if environ.get(name)}


def _warn_about_tensor_groups(topology: Topology, processes_per_host: int) -> None:
    degree = topology.tp_size
    if degree & (degree - 1):
        _warn(f"tensor_parallel_degree {degree} is not a power of two, which is usually slow.")
    for members in topology.groups(CommGroup.TP_GROUP):
        hosts = sorted({rank // processes_per_host for rank in members})
        if len(hosts) > 1:
            _warn(
                f"the tensor-parallel group of ranks {', '.join(map(str, members))} spans hosts "
                f"{', '.join(map(str, hosts))}, which is usually slow: put T last in "
                "placement_strategy and keep tensor_parallel_degree within one host."
            )
            return


def _raise_if(problems: list[str]) -> None:
    if problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        raise ConfigError(f"the configuration has {len(problems)} problem(s):{listed}")


def _warn(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=3)  # the caller of load or check_world
