"""Settings of the service's debugger that notebooks import, and what becomes of them here.

Where TensorBoard's files go acts. Rules are kept with the job and evaluated by nobody, which the
job's description says.

Source: estimator interface, section 1 (debugger); the public signatures of the settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.request.document import TENSORBOARD_PATH

__all__ = ["ProfilerRule", "Rule", "TensorBoardOutputConfig", "rule_configs"]


@dataclass(frozen=True)
class TensorBoardOutputConfig:
    """Where files of TensorBoard go while a job runs.

    Args:
        s3_output_path: an address or a folder; they lie below it, at
            ``<job>/tensorboard-output``.
        container_local_output_path: where the script writes them; default
            ``/opt/ml/output/tensorboard``, which is in the folder of the job.

    Raises:
        ConfigError: there is no place to keep them.
    """

    s3_output_path: str
    container_local_output_path: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.s3_output_path, str) or not self.s3_output_path:
            raise ConfigError(
                "TensorBoardOutputConfig needs s3_output_path, an address or a folder; got "
                f"{describe(self.s3_output_path)}."
            )

    @property
    def local_path(self) -> str:
        """Where the script writes."""
        return self.container_local_output_path or TENSORBOARD_PATH


class Rule:
    """A rule of the debugger: it can be made and given to an estimator, and is not evaluated.

    Attributes:
        name: of the rule.
    """

    def __init__(self, name: str | None = None, **_: object) -> None:
        self.name = name or type(self).__name__

    @classmethod
    def sagemaker(cls, base_config: object, name: str | None = None, **_: object) -> Rule:
        """Returns a rule that the service has ready, by what ``rule_configs`` has of it."""
        return cls(name or str(getattr(base_config, "name", base_config)))

    @classmethod
    def custom(cls, name: str, *_: object, **__: object) -> Rule:
        """Returns a rule of one's own."""
        return cls(name)


class ProfilerRule(Rule):
    """A rule of the profiler; the same."""


class _Configuration:
    """What ``rule_configs.NAME()`` returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object, **__: object) -> _Configuration:
        return self


class _Configurations:
    """Rules of the service, by whatever name: ``rule_configs.loss_not_decreasing()``."""

    def __getattr__(self, name: str) -> _Configuration:
        if name.startswith("_"):
            raise AttributeError(name)
        words = name.split("_")
        return _Configuration("".join(word[:1].upper() + word[1:] for word in words))


rule_configs = _Configurations()


def rule_configurations(rules: Iterable[Rule] | None) -> list[dict[str, Any]]:
    """Returns what the document of a job has of the rules.

    Raises:
        ConfigError: something among them is no rule.
    """
    found = list(rules or ())
    for rule in found:
        if not isinstance(rule, Rule):
            raise ConfigError(
                f"rules are made by Rule.sagemaker(...) and its like; got {describe(rule)}."
            )
    return [{"RuleConfigurationName": rule.name} for rule in found]
