"""Whether other processes of the job still run, as far as this host can tell.

A framework's collective ends with an error when any of its members dies, and often cannot say which
one. Processes of one host see each other in ``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "ended", "unknown"]

_PROC = Path("/proc")
#: States of ``/proc/PID/stat``, see proc(5).
_STATES: dict[str, State] = {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}


@dataclass(frozen=True)
class Presence:
    """Where a process runs.

    Attributes:
        machine: names the kernel and the process ids that count there; empty where unknown.
        pid: its process id.
        started: when it started, in the kernel's words: process ids come again.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Presence:
        """Returns that of this process."""
        pid = os.getpid()
        return cls(_machine(), pid, (_stat(pid) or ("", ""))[1])

    @property
    def state(self) -> State:
        """What this host knows of the process; of one on another host nothing."""
        if not self.machine or self.machine != _machine():
            return "unknown"
        found = _stat(self.pid)
        if found is None or found[1] != self.started:
            return "ended"
        return state_of(self.pid)


def absent(presences: Sequence[Presence], ranks: Sequence[int]) -> dict[int, State]:
    """Returns those of ``ranks`` of which this host knows that they ended or were stopped.

    Args:
        presences: of every rank of the job.
        ranks: those to look at.
    """
    states = {rank: presences[rank].state for rank in ranks}
    return {rank: state for rank, state in states.items() if state in ("ended", "stopped")}


def state_of(pid: int) -> State:
    """Returns what this host knows of the process that has this id now."""
    found = _stat(pid)
    return "ended" if found is None else _STATES.get(found[0], "running")


def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """Returns state and start time of a process; None if there is none."""
    try:
        # "id (name) state ...", and the name may hold anything; the start is field 22.
        words = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]
