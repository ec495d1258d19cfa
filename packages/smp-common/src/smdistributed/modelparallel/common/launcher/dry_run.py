"""What a job would be, as tables: hosts, ranks, groups, configuration, and mpirun's command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.launcher.hosts import Host, host_of_ranks
from smdistributed.modelparallel.common.topology import Coordinates, Topology

_NO_TERMINAL_WIDTH = 120


def show(
    hosts: Sequence[Host],
    config: Config,
    sources: Mapping[str, str],
    command: Sequence[str],
    console: Console | None = None,
) -> None:
    """Prints the tables.

    Args:
        hosts: the hosts with their number of processes.
        config: the configuration as the job will read it.
        sources: where the value of each parameter comes from, where smprun knows better than
            ``config``.
        command: mpirun's command line.
        console: where to print; None for standard output.

    Raises:
        ConfigError: the degrees do not divide the number of processes.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = _NO_TERMINAL_WIDTH
    topology = config.topology(sum(host.slots or 0 for host in hosts))
    console.print(_hosts(hosts), _ranks(hosts, topology), _groups(topology))
    console.print(_configuration(config, sources))
    # One line however long, to be copied.
    console.print(shlex.join(command), soft_wrap=True, markup=False, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _hosts(hosts: Sequence[Host]) -> Table:
    table = _table("Hosts", "host", "processes", "ranks")
    first = 0
    for host in hosts:
        last = first + (host.slots or 0) - 1
        table.add_row(host.name, str(host.slots), f"{first}-{last}" if last > first else str(last))
        first = last + 1
    return table


def _ranks(hosts: Sequence[Host], topology: Topology) -> Table:
    ranks = [name for name in Coordinates._fields if _is_shown(name, topology)]
    table = _table("Ranks", "rank", "host", "local_rank", *ranks[:3])
    for name in ranks[3:]:
        table.add_column(name)
    local: Counter[str] = Counter()
    for rank, host in enumerate(host_of_ranks(hosts)):
        place = topology.coordinates(rank)
        numbers = [str(getattr(place, name)) for name in ranks]
        table.add_row(str(rank), host, str(local[host]), *numbers)
        local[host] += 1
    return table


def _groups(topology: Topology) -> Table:
    table = _table("Groups", "group", "members (ranks)")
    for group in CommGroup:
        if _is_shown(group.name.lower(), topology):
            members = topology.groups(group)
            table.add_row(group.name, "  ".join(f"({' '.join(map(str, m))})" for m in members))
    return table


def _is_shown(name: str, topology: Topology) -> bool:
    """Whether the name of a rank or a group says something of its own."""
    return topology.cp_size > 1 or "cp_" not in name


def _configuration(config: Config, sources: Mapping[str, str]) -> Table:
    table = _table("Configuration", "parameter", "value", "source")
    for name, value, origin in config.explain():
        table.add_row(name, str(value), _source(sources.get(name), origin))
    return table


def _source(known: str | None, origin: str) -> str:
    if known is not None:
        return known
    # smprun calls no smp.init: such a value stands for one that the script has to give.
    return "script (assumed)" if origin == "init" else origin
