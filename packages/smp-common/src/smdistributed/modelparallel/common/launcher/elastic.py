"""Where a job starts again: on the hosts that answer, with as many processes as it can have there.

The degrees of pipeline, tensor, context and expert parallelism stay, so a job has whole multiples
of what a replica of the model takes. The number of replicas follows from the hosts, and how many
of them share parameters from that.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.common.config import Config, Framework, load
from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.launcher import settings
from smdistributed.modelparallel.common.launcher.hosts import Host, place

_NAMES_VARIABLE = "SM_HOSTS"
_SHARDS = "sharded_data_parallel_degree"


class NoPlaceError(SMPError):
    """The hosts that answer have no room for the job."""


@dataclass(frozen=True)
class Start:
    """Where a job starts.

    Attributes:
        hosts: with their processes, in rank order.
        parameters: of the configuration, those that are not as asked.
    """

    hosts: tuple[Host, ...]
    parameters: Mapping[str, Any]

    @property
    def num_ranks(self) -> int:
        """Number of processes on all hosts."""
        return sum(host.slots or 0 for host in self.hosts)


class Placement:
    """Where a job starts, each time.

    Args:
        named: the hosts that the job may use, none for this one; those with a number of processes
            that it does not need are spare.
        placed: those that it starts on at first.
        framework: whose parameters it has.
        given: its parameters, as far as smprun knows them.
        silent: returns which of some hosts do not answer.

    Attributes:
        start: where it starts next.
    """

    def __init__(
        self,
        named: Sequence[Host],
        placed: tuple[Host, ...],
        framework: Framework,
        given: Mapping[str, Any],
        silent: Callable[[Sequence[Host]], frozenset[str]],
    ) -> None:
        self._named = named if named and all(host.slots for host in named) else placed
        self._framework = framework
        self._silent = silent
        self._gone: frozenset[str] = frozenset()
        self._given = given
        self.start = Start(placed, {})
        self._num_asked = self.start.num_ranks

    def take(self, given: Mapping[str, Any]) -> None:
        """Takes the parameters that rank 0 tells, those of the script among them."""
        self._given = {**given, **{name: self._given[name] for name in self.start.parameters}}

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns ``environ`` with what is otherwise at the next start than asked."""
        own = settings.changed(environ, self.start.parameters)
        with contextlib.suppress(KeyError, ValueError, TypeError):
            # Launchers of jobs name the hosts, in the order of ranks.
            named = zip(json.loads(environ[_NAMES_VARIABLE]), self._named, strict=True)
            used = {host.name for host in self.start.hosts}
            left = [name for name, host in named if host.name in used]
            own[_NAMES_VARIABLE] = json.dumps(left, separators=(",", ":"))
        return own

    def renew(self) -> str:
        """Asks the hosts, and takes those that answer; returns what has changed, in words.

        Raises:
            NoPlaceError: the configuration needs more processes than there can be.
        """
        if len(self._named) == 1:
            return ""  # smprun itself runs there
        gone, before = self._silent(self._named), self._gone
        if gone == before:
            return ""
        self._gone = gone
        lost = [host.name for host in self._named if host.name in gone - before]
        back = [host.name for host in self._named if host.name in before - gone]
        found = [f"{_counted(lost)} gone"] * bool(lost) + [f"{_counted(back)} back"] * bool(back)
        there = [host for host in self._named if host.name not in gone]
        self.start, config = self._start_on(there, " and ".join(found))
        words = f"{' and '.join(found)}; {self.start.num_ranks} of {self._num_asked} processes"
        if config is not None and not config.auto:
            words += f", data_parallel {config.topology(self.start.num_ranks).rdp_size}"
        return words + "".join(f", {name} {v}" for name, v in self.start.parameters.items())

    def _start_on(self, hosts: Sequence[Host], why: str) -> tuple[Start, Config | None]:
        there = sum(host.slots or 0 for host in hosts)
        for number in range(min(there, self._num_asked), 0, -1):
            if not self._given:  # a script that nobody knows
                return Start(place(hosts, number), {}), None
            if (config := configured(self._framework, self._given, number)) is not None:
                degree = config.sharded_data_parallel_degree
                is_asked = degree == self._given.get(_SHARDS, 1)
                return Start(place(hosts, number), {} if is_asked else {_SHARDS: degree}), config
        needed = next(
            n for n in range(1, self._num_asked + 1) if configured(self._framework, self._given, n)
        )
        raise NoPlaceError(
            f"{why}; the others have room for {there} of {self._num_asked} processes, and the "
            f"configuration needs {needed} at least"
        )


def configured(framework: Framework, given: Mapping[str, Any], num_ranks: int) -> Config | None:
    """Returns the configuration of a job with so many processes; None where it cannot have them.

    Parameters stay in as many shards as asked or more, so that they still fit; with fewer replicas
    than that, in as many as there are.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown at the first start
        try:
            config = load(framework, given, {})
            if config.sharded_data_parallel_degree > 1:
                replicas = config.topology(num_ranks).rdp_cp_size
                degrees = [n for n in range(1, replicas + 1) if replicas % n == 0]
                fitting = [n for n in degrees if n >= config.sharded_data_parallel_degree]
                degree = min(fitting, default=replicas)
                config = load(framework, {**given, _SHARDS: degree}, {})
            config.check_world(num_ranks, framework)
        except ConfigError:
            return None
    return config


def _counted(names: Sequence[str]) -> str:
    """Returns ``host a is`` or ``hosts a, b are``."""
    if len(names) == 1:
        return f"host {names[0]} is"
    return f"hosts {', '.join(names)} are"
