"""Where the ranks of a running job are: ``smprun --status PID`` asks, and SIGQUIT to smprun.

``smprun`` has mpirun hand a signal on to every rank, on every host. Each answers by a line that
``smprun`` takes out of its output, see ``whereabouts``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smdistributed.modelparallel.common.comm.presence import state_of
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.launcher import processes
from smdistributed.modelparallel.common.names_of_ranks import listed
from smdistributed.modelparallel.common.whereabouts import Whereabouts

#: How long ranks may take to answer: those that compute on loaded cores come late.
_ANSWER_SECONDS = 5.0
#: A rank that has only just started does not listen yet.
_ASK_AGAIN_SECONDS = 1.0
_MOST_WAITING = 8
_PIECE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_RANK_VARIABLE = b"OMPI_COMM_WORLD_RANK="


class Desk:
    """Where it is asked where the ranks are, at a running smprun. A context manager.

    Args:
        hosts: of each rank.
        ask: asks all ranks.
    """

    def __init__(self, hosts: Sequence[str], ask: Callable[[], object]) -> None:
        self._hosts = hosts
        self._ask = ask
        self._here = False
        self._askers: list[socket.socket] = []
        self._answers: dict[int, Whereabouts] = {}
        self._until: float | None = None
        self._ask_at, self._asked = 0.0, False

    def __enter__(self) -> Desk:
        self._door: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(_address(os.getpid()))
            self._door.listen(_MOST_WAITING)
            self._door.setblocking(False)
        except OSError:
            self._door.close()
            self._door = None  # another program has the name: a signal still asks
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._askers, self._door):
            if each is not None:
                each.close()

    def ask_here(self) -> None:
        """Has the next answer written to smprun's own stderr; for handlers of signals."""
        self._here = True

    def take(self, told: Whereabouts) -> None:
        """Takes the answer of a rank."""
        self._answers[told.rank] = told

    def look(self) -> None:
        """Asks the ranks where somebody wants to know, and answers when they have."""
        self._let_in()
        if not (self._here or self._askers):
            return
        now = time.monotonic()
        if self._until is None:
            self._answers.clear()
            self._until, self._ask_at = now + _ANSWER_SECONDS, now
        if len(self._answers) == len(self._hosts) or now > self._until:
            self._answer()
        elif now >= self._ask_at:
            if self._asked and self._others_are_stopped():
                self._answer()
                return
            self._asked, self._ask_at = True, now + _ASK_AGAIN_SECONDS
            self._ask()

    def _others_are_stopped(self) -> bool:
        states = _states()
        silent = set(range(len(self._hosts))) - self._answers.keys()
        return all(states.get(rank) == "stopped" for rank in silent)

    def _let_in(self) -> None:
        while self._door is not None:
            try:
                asker, _ = self._door.accept()
            except OSError:
                return
            if _uid(asker) in (0, os.geteuid()):
                self._askers.append(asker)
            else:
                asker.close()

    def _answer(self) -> None:
        told = Told(described(self._hosts, self._answers), len(self._hosts), self._answers)
        if self._here:
            sys.stderr.write(told.text)
            sys.stderr.flush()
        for asker in self._askers:
            with asker, contextlib.suppress(OSError):
                asker.sendall(told.packed())
        self._here, self._asked, self._until = False, False, None
        self._askers.clear()


@dataclass(frozen=True)
class Told:
    """Where the ranks of a job are.

    Attributes:
        text: in lines.
        size: number of ranks.
        answers: of those that have answered.
    """

    text: str
    size: int
    answers: Mapping[int, Whereabouts]

    def packed(self) -> bytes:
        """Returns it as bytes."""
        answers = [each.text() for each in self.answers.values()]
        return json.dumps([self.text, self.size, answers]).encode()

    @staticmethod
    def unpacked(data: bytes) -> Told:
        """Returns what ``packed`` has made bytes of."""
        text, size, answers = json.loads(data)
        found = filter(None, map(Whereabouts.parse, answers))
        return Told(text, size, {each.rank: each for each in found})


def told_by(pid: int) -> Told:
    """Returns where the ranks of a job are.

    Args:
        pid: of its smprun, on this machine.

    Raises:
        SMPError: it is none, or has no ranks at present.
    """
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(_address(pid))
            its_pid, *_ = _credentials(link)
            if its_pid != pid:
                raise OSError(f"process {its_pid} has taken its name")
            pieces = []
            while piece := link.recv(_PIECE_BYTES):
                pieces.append(piece)
        except OSError as error:
            raise SMPError(
                "--status must be followed by the process id of an smprun of yours that runs on "
                f"this machine; received {pid}: {error}. 'pgrep -af smprun' shows them."
            ) from None
    data = b"".join(pieces)
    return Told.unpacked(data) if data else Told("the job has ended meanwhile\n", 0, {})


def described(hosts: Sequence[str], answers: Mapping[int, Whereabouts]) -> str:
    """Returns where all ranks are, in lines; ranks that are at the same place together.

    Args:
        hosts: of each rank.
        answers: of those that have answered.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    longest: dict[tuple[str, ...], list[float]] = {}
    states = {} if len(answers) == len(hosts) else _states()
    for rank in range(len(hosts)):
        told = answers.get(rank) or Whereabouts(rank, hosts[rank], _of_silent(states.get(rank, "")))
        place = (told.line, *(each.what for each in told.activities))
        seconds = [each.seconds for each in told.activities]
        together.setdefault(place, []).append(rank)
        longest[place] = list(map(max, seconds, longest.get(place, seconds)))
    lines = []
    for (line, *activities), ranks in together.items():
        there = dict.fromkeys(answers[r].host if r in answers else hosts[r] for r in ranks)
        lines.append(f"{listed(ranks)} ({', '.join(there)}): {line}")
        for what, passed in zip(activities, longest[line, *activities], strict=True):
            lines.append(f"  for {passed:.0f} s: {what}")
    return "".join(f"{line}\n" for line in lines)


def _of_silent(state: str) -> str:
    if state == "stopped":
        return "is stopped (SIGSTOP, or a debugger)"
    return (
        f"did not answer within {_ANSWER_SECONDS:g} s: it is starting or ending, or runs code that "
        "holds Python's lock, as MPI's start does"
    )


def _states() -> dict[int, str]:
    """Returns what this host knows of the processes of ranks that it runs."""
    found: dict[int, str] = {}
    for pid in processes.descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(pid) == pid:  # mpirun gives each rank a group of its own
                with open(f"/proc/{pid}/environ", "rb") as file:
                    for entry in file.read().split(b"\0"):
                        if entry.startswith(_RANK_VARIABLE):
                            found[int(entry[len(_RANK_VARIABLE) :])] = state_of(pid)
    return found


def _address(pid: int) -> str:
    """Returns the name of a socket that is no file, so that nobody has to remove it."""
    return f"\0smprun-{pid}"


def _uid(link: socket.socket) -> int:
    return _credentials(link)[1]


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group of the other end."""
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return pid, uid, gid
