"""A plan: which configurations of a job fit, the fastest first, as programs take them."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.planning.simulator import Timeline
from smdistributed.modelparallel.common.search import page as pages
from smdistributed.modelparallel.common.search import tables
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.common.search.ranking import Estimate, Search

#: Gives the words of the command that starts a job with the parameters of a line.
CommandOf = Callable[["Line"], Sequence[str]]

#: What asks for a plan, and is no part of what is planned.
_ASKING = ("auto",)


@dataclass(frozen=True)
class Line:
    """A configuration that fits, and what it is estimated to do.

    Attributes:
        changes: the parameters that ask for it, of those that the script does not give so.
        config: all parameters of the job, those that the script gives among them; for ``smp.init``.
        step_seconds: of a step whose end is waited for, the optimizer's update included.
        examples_per_second: that all replicas train together.
        idle: share of the time of passes in which ranks wait for each other.
        memory: what each rank of a pipeline holds at its fullest, in bytes by kind.
    """

    changes: Mapping[str, Any]
    config: Mapping[str, Any]
    step_seconds: float
    examples_per_second: float
    idle: float
    memory: tuple[RankMemory, ...]

    @property
    def peak_bytes(self) -> float:
        """What the fullest rank holds."""
        return max(each.total for each in self.memory)


class Plan:
    """What a model can do on a machine, by estimate.

    Args:
        profile: of a step of the model.
        machine: the devices.
        most: lines, at most.
        factor: by which steps of this model were measured to take longer; None if none were.

    Attributes:
        lines: the configurations that fit, the fastest first; of equally fast ones, what leaves
            more memory.

    Raises:
        ConfigError: the batch cannot be shared out by any configuration, whatever the memory is.
    """

    def __init__(
        self, profile: ModelProfile, machine: Machine, most: int = 10, factor: float | None = None
    ) -> None:
        self._profile = profile
        self._machine = machine
        self._search = Search(profile, machine)
        self._factor = factor
        self._ranking = self._search.ranking(most).times(1.0 if factor is None else factor)
        self.lines = tuple(self._line(each) for each in self._ranking.best)

    @property
    def best(self) -> Line:
        """The first line.

        Raises:
            ConfigError: nothing fits; says what lacks least.
        """
        if not self.lines:
            raise ConfigError(
                f"a job must fit into {tables.gib(self._machine.memory_bytes)} GiB of each of "
                f"{self._machine.num_devices} devices; no configuration does: take more devices, "
                "or devices with more memory, or activation checkpointing in the script.\n"
                + "\n".join(tables.refusals(self._ranking))
            )
        return self.lines[0]

    def table(self, width: int = tables.WIDTH) -> str:
        """Returns the plan as text: what was planned for, the lines, and what does not fit.

        Args:
            width: of the table, in characters.
        """
        parts = [*self._summary(), ""]
        if self.lines:
            parts.append(tables.best_of(self._ranking, width))
        return "\n".join([*parts, *tables.refusals(self._ranking)])

    def _summary(self) -> list[str]:
        return tables.summary(self._profile, self._machine, self._ranking, self._factor)

    def save(self, path: str | os.PathLike[str], command_of: CommandOf | None = None) -> None:
        """Writes the plan as JSON: seconds, and bytes of each rank by kind.

        Args:
            path: of the file.
            command_of: gives the words of the command that starts a line; None for none.
        """
        text = json.dumps(self._document(command_of), indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")

    def page(self) -> str:
        """Returns the plan as a page of HTML, with pictures of its first line.

        Raises:
            ConfigError: nothing fits.
        """
        best = self.best
        is_pipeline = len(best.memory) > 1
        return pages.page(
            self.table(),
            [(each.step_seconds, each.peak_bytes) for each in self.lines],
            best.memory,
            self._machine.memory_bytes,
            self.timeline(best) if is_pipeline else None,
        )

    def timeline(self, line: Line) -> Timeline:
        """Returns the simulated passes of a step of one of ``lines``."""
        estimate = self._ranking.best[self.lines.index(line)]
        return self._search.timeline(estimate.configuration)

    def _line(self, estimate: Estimate) -> Line:
        given = {k: v for k, v in self._profile.settings.items() if k not in _ASKING}
        changes = estimate.configuration.settings(self._profile)
        return Line(
            changes,
            {**given, **changes},
            estimate.seconds,
            estimate.rate,
            estimate.idle,
            estimate.memory,
        )

    def _document(self, command_of: CommandOf | None) -> dict[str, Any]:
        def written(line: Line) -> dict[str, Any]:
            command = {} if command_of is None else {"command": shlex.join(command_of(line))}
            return {
                **command,
                "parameters": dict(line.changes),
                "step_seconds": line.step_seconds,
                "examples_per_second": line.examples_per_second,
                "idle": line.idle,
                "memory_bytes": [dataclasses.asdict(rank) for rank in line.memory],
            }

        return {
            "step": self._profile.step,
            "batch": self._profile.batch,
            "device": self._machine.device.name,
            "devices": self._machine.num_devices,
            "hosts": self._machine.num_hosts,
            "device_memory_bytes": self._machine.memory_bytes,
            "estimated": self._profile.timed_on != self._machine.device.name,
            "measured_factor": self._factor,
            "best": [written(each) for each in self.lines],
            "does_not_fit": [written(self._line(each)) for each in self._ranking.refused],
        }
