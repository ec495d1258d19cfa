"""The hosts of a job: how the user names them, and which rank runs on which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from smdistributed.modelparallel.common.errors import ConfigError

LOCAL_HOST = "localhost"
#: More is a slip of the finger.
_MOST_RANKS = 1 << 20
#: Names become arguments of ssh and words of the remote shell.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host as the user named it.

    Attributes:
        name: host name or IPv4 address.
        slots: most processes it runs; None where the user left it open.
    """

    name: str
    slots: int | None = None


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Reads ``a:4,b:4`` or ``a,b``.

    Raises:
        ConfigError: an empty name, a number of slots below 1, or a host named twice.
    """
    hosts = []
    for entry in text.split(","):
        name, colon, slots = entry.strip().partition(":")
        hosts.append(_host(name, slots if colon else None, f"the host list {text!r}"))
    return _distinct(hosts, f"the host list {text!r}")


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Reads a host file: a host a line, ``a``, ``a:4`` or ``a slots=4``, with ``#`` comments.

    Raises:
        ConfigError: a line of another form, a host named twice, or no host at all.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace("=", " = ").split()
        if not words:
            continue
        where = f"{path}, line {number}"
        name, colon, slots = words[0].partition(":")
        if len(words) == 1:
            hosts.append(_host(name, slots if colon else None, where))
        elif not colon and words[1:3] == ["slots", "="] and len(words) == 4:
            hosts.append(_host(name, words[3], where))
        else:
            raise ConfigError(
                f"{where}: a line is a host and its number of processes; received "
                f"{line.strip()!r}: write 'name slots=4' or 'name:4'."
            )
    if not hosts:
        raise ConfigError(f"a host file must name at least one host; {path} names none.")
    return _distinct(hosts, path)


def place(hosts: Sequence[Host], num_ranks: int | None) -> tuple[Host, ...]:
    """Returns the hosts with the processes that each of them runs, in rank order.

    The first host is filled before the second, so ranks are consecutive on a host. Hosts without
    slots share the processes evenly.

    Args:
        hosts: as the user named them; empty for this host alone.
        num_ranks: number of processes; None for every slot of ``hosts``.

    Raises:
        ConfigError: the number of processes is missing or does not fit the hosts.
    """
    if num_ranks is not None and not 1 <= num_ranks <= _MOST_RANKS:
        bound = "at least 1" if num_ranks < 1 else f"at most {_MOST_RANKS}"
        raise ConfigError(f"the number of processes (-n) must be {bound}; received {num_ranks}.")
    if not hosts:
        hosts = (Host(LOCAL_HOST),)
    open_hosts = [host.name for host in hosts if host.slots is None]
    if open_hosts and len(open_hosts) < len(hosts):
        raise ConfigError(
            "either every host or none has a number of processes; "
            f"received none for {', '.join(open_hosts)}: write {open_hosts[0]}:4."
        )
    if open_hosts:
        return _share(hosts, num_ranks)
    return _fill(hosts, num_ranks)


def host_of_ranks(placed: Sequence[Host]) -> tuple[str, ...]:
    """Returns the host name of each rank, for the hosts that ``place`` returned."""
    return tuple(host.name for host in placed for _ in range(host.slots or 0))


def _share(hosts: Sequence[Host], num_ranks: int | None) -> tuple[Host, ...]:
    if num_ranks is None:
        raise ConfigError("the number of processes is not known: give -n, or hosts as a:4,b:4.")
    if num_ranks % len(hosts):
        raise ConfigError(
            f"hosts without a number share the processes evenly; {num_ranks} processes cannot be "
            f"shared by {len(hosts)} hosts: give a multiple of {len(hosts)}, or hosts as a:4,b:2."
        )
    return tuple(Host(host.name, num_ranks // len(hosts)) for host in hosts)


def _fill(hosts: Sequence[Host], num_ranks: int | None) -> tuple[Host, ...]:
    total = sum(host.slots or 0 for host in hosts)
    if num_ranks is None:
        num_ranks = total
    if num_ranks > total:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"-n ({num_ranks}) must not exceed the processes of the hosts ({total} in {listed}): "
            "lower -n or raise the hosts' numbers."
        )
    placed = []
    for host in hosts:
        used = min(host.slots or 0, num_ranks)
        num_ranks -= used
        if used:
            placed.append(Host(host.name, used))
    return tuple(placed)


def _host(name: str, slots: str | None, where: str) -> Host:
    if not name:
        raise ConfigError(f"{where}: a host needs a name: write a:4,b:4.")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: the name of a host has letters, digits and '_', and between them '.' and "
            f"'-'; received {name!r}: write a:4,b:4. A user's name for ssh belongs into "
            "~/.ssh/config."
        )
    if slots is None:
        return Host(name)
    if not slots.isdecimal() or int(slots) < 1:
        raise ConfigError(
            f"{where}: the number of processes of host {name} must be an integer of at least 1; "
            f"received {slots!r} (IPv6 addresses are not understood: use names or IPv4)."
        )
    return Host(name, int(slots))


def _distinct(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f"{where}: a host may be named once; {name} is named {times} times: "
            f"add its processes up, as in {name}:{times}."
        )
    return tuple(hosts)
