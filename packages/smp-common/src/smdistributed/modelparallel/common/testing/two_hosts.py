"""Two hosts, played by two network namespaces; a script stands in for ssh. They need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: By which each host reaches the other.
INTERFACE = "eth0"
#: mpirun calls it as ssh: a host, then words of shell. Each host has a name of its own.
AGENT = """#!/bin/sh
[ -e "{down}" ] && exit 255
case "$1" in
  {other}) namespace={namespace} ;;
  *) echo "unknown host $1" >&2; exit 255 ;;
esac
shift
exec ip netns exec "$namespace" unshare --uts \
    sh -c 'hostname {namespace}; env -i PATH="$PATH" HOME="$HOME" sh -c "$0"' "$*"
"""


class NoHostsError(Exception):
    """Namespaces cannot be made here."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts; what starts a job runs on the first.

    Attributes:
        names: of both; the first still calls itself as this machine does.
        addresses: of both.
        agent: the script that stands in for ssh.
        down: a file; while it is there, the second answers no more.
    """

    names: tuple[str, str]
    addresses: tuple[str, str]
    agent: Path
    down: Path

    def lose_second(self) -> None:
        """Ends every process of the second host, and has it answer no more."""
        self.down.touch()
        there = subprocess.run(
            ["ip", "netns", "pids", self.names[1]], check=True, capture_output=True, text=True
        )
        for pid in there.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @property
    def mpi_options(self) -> str:
        """What mpirun needs to be told."""
        # By its name: what follows a space in its path mpirun would take for a word of its own.
        return (
            f"-mca plm_rsh_agent {self.agent.name} -mca btl_tcp_if_include {self.addresses[0]}/24"
        )

    def run(
        self, command: Sequence[str], directory: Path, timeout_seconds: float, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first host."""
        path = os.pathsep.join((str(self.agent.parent), os.environ["PATH"]))
        return subprocess.run(
            ["ip", "netns", "exec", self.names[0], *command],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[Hosts]:
    """Makes two hosts, and takes them away at the end.

    Args:
        directory: for the script that stands in for ssh.

    Raises:
        NoHostsError: they cannot be made here.
    """
    if shutil.which("ip") is None:
        raise NoHostsError("needs iproute2 (ip), to make network namespaces")
    # Namespaces and links are the machine's: names must not meet those of another run.
    mark = f"{os.getpid() % 100000}"
    names = (f"smpa{mark}", f"smpb{mark}")
    addresses = ("10.231.7.1", "10.231.7.2")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            raise NoHostsError(
                f"network namespaces cannot be made here: {error.stderr.decode().strip()}"
            ) from None
        _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("link", "set", name, "netns", name, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        agent = directory / "agent"
        down = directory / "down"
        agent.write_text(AGENT.format(other=addresses[1], namespace=names[1], down=down))
        agent.chmod(0o755)
        yield Hosts(names, addresses, agent, down)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
