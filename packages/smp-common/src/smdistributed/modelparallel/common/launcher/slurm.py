"""The allocation of Slurm that smprun runs in: its hosts, and how many processes each may run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.hosts import Host, parse_host_list

_LIMIT_SECONDS = 20.0
#: Slurm's reasons for the end of an allocation.
_LOST = ("NodeDown", "NodeFail")


def is_inside(environ: Mapping[str, str]) -> bool:
    """Tells whether a process with this environment runs in an allocation."""
    return bool(environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"))


def allocated_hosts(environ: Mapping[str, str], num_ranks: int | None) -> tuple[Host, ...]:
    """Returns the hosts of the allocation, with its tasks; outside of one, none.

    More processes than tasks are shared out evenly: a job that asks Slurm for one task a host
    starts the processes of the host itself.

    Args:
        environ: smprun's environment.
        num_ranks: of the job; None for the allocation's number of tasks.

    Raises:
        ConfigError: Slurm does not say which hosts these are.
    """
    if not is_inside(environ):
        return ()
    names = _names(environ["SLURM_JOB_NODELIST"])
    tasks = tasks_per_host(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(names) or (num_ranks is not None and num_ranks > sum(tasks)):
        return parse_host_list(",".join(names))
    return parse_host_list(",".join(f"{n}:{count}" for n, count in zip(names, tasks, strict=True)))


def has_lost_a_node(environ: Mapping[str, str]) -> bool:
    """Tells whether Slurm ends this allocation because one of its nodes is gone."""
    words = ("squeue", "-h", "-j", environ.get("SLURM_JOB_ID", ""), "-t", "all", "-o", "%r")
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() in _LOST


def tasks_per_host(text: str) -> tuple[int, ...]:
    """Reads ``SLURM_TASKS_PER_NODE``: ``2(x3),1`` stands for 2, 2, 2 and 1; empty if it is not."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return ()
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _names(compressed: str) -> list[str]:
    """Expands ``node[1-3]``."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", compressed],
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"in an allocation of Slurm, smprun asks scontrol for its hosts; received {error} for "
            f"SLURM_JOB_NODELIST={compressed!r}: name the hosts with --hosts a:4,b:4, or unset "
            "SLURM_JOB_ID."
        ) from None
    return done.stdout.split()
