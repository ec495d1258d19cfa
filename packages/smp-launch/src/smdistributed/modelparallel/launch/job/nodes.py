"""Where the hosts of a job are: parts of this machine, nodes of Slurm, or reached by ssh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.common.launcher import slurm
from smdistributed.modelparallel.common.launcher.hosts import Host, parse_hostfile

#: Names a file of hosts that mpirun reaches by ssh, as for ``smprun --hostfile``.
HOSTFILE_VARIABLE = "SMP_HOSTFILE"


@dataclass(frozen=True)
class Nodes:
    """The machines of a job's hosts, in their order.

    Attributes:
        names: of each; empty where the hosts are parts of this machine.
        by_ssh: whether mpirun reaches them by ssh.
    """

    names: tuple[str, ...]
    by_ssh: bool = False

    @property
    def are_here(self) -> bool:
        """Whether the hosts are parts of this machine."""
        return not self.names[0]


def nodes_of(count: int, environ: Mapping[str, str]) -> Nodes:
    """Returns the machines of a job of so many hosts.

    Raises:
        ConfigError: the file of hosts cannot be read, or has too few.
    """
    if count > 1 and (path := environ.get(HOSTFILE_VARIABLE)):
        return Nodes(tuple(host.name for host in _listed(path, count)), by_ssh=True)
    nodes = slurm.allocated_hosts(environ, None) if count > 1 else ()
    return Nodes(tuple(node.name for node in nodes) if len(nodes) == count else ("",) * count)


def check(count: int, environ: Mapping[str, str], *, has_mpi: bool, has_pipes: bool) -> None:
    """Checks that the hosts can be reached as the job needs it.

    Args:
        count: of hosts.
        environ: with the variable.
        has_mpi: whether MPI starts the processes.
        has_pipes: whether channels are streams.

    Raises:
        ConfigError: as ``nodes_of``.
        UnsupportedError: the job needs more than mpirun does on other hosts.
    """
    if not nodes_of(count, environ).by_ssh:
        return
    if not has_mpi:
        raise UnsupportedError(
            f"hosts of {HOSTFILE_VARIABLE} are reached by mpirun alone; the job starts its "
            "processes otherwise: add 'mpi': {'enabled': True} to distribution, or use Slurm."
        )
    if has_pipes:
        raise UnsupportedError(
            f"channels of jobs on hosts of {HOSTFILE_VARIABLE} are files in the folder of the "
            "jobs, which all hosts see; got input_mode 'Pipe': use 'File', or Slurm."
        )


def _listed(path: str, count: int) -> tuple[Host, ...]:
    try:
        hosts = parse_hostfile(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{HOSTFILE_VARIABLE} must name a file of hosts; {error}.") from None
    if len(hosts) < count:
        raise ConfigError(
            f"{HOSTFILE_VARIABLE} must have a host for each of the job; {path} has {len(hosts)} "
            f"of {count}: add some, or lower instance_count."
        )
    return hosts[:count]
