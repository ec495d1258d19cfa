"""Which hosts answer: each starts next to nothing, by the way that ranks come by."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from smdistributed.modelparallel.common.launcher.command import own_files
from smdistributed.modelparallel.common.launcher.hosts import Host

#: mpirun's command line, to start next to nothing on each of some hosts.
Command = Callable[[Sequence[Host]], list[str]]
#: Longer than ssh needs on a loaded host.
_ANSWER_SECONDS = 20.0
#: A host is gone that is silent so often.
_TIMES = 2
_MOST_AT_ONCE = 16


def silent(
    hosts: Sequence[Host],
    command: Command,
    environ: Mapping[str, str],
) -> frozenset[str]:
    """Returns the names of the hosts that do not answer.

    All are asked at once, and each by itself only where one of them is silent.

    Args:
        hosts: to ask.
        command: mpirun's.
        environ: its environment.
    """
    if _answer([hosts], command, environ) == [True]:
        return frozenset()
    left = list(hosts)
    for _ in range(_TIMES):
        asked, left = left, []
        for first in range(0, len(asked), _MOST_AT_ONCE):
            group = asked[first : first + _MOST_AT_ONCE]
            answers = _answer([[host] for host in group], command, environ)
            left += [host for host, is_there in zip(group, answers, strict=True) if not is_there]
    return frozenset(host.name for host in left)


def _answer(
    groups: Sequence[Sequence[Host]],
    command: Command,
    environ: Mapping[str, str],
) -> list[bool]:
    """Tells of each group of hosts whether all of it answers in time."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    nowhere = subprocess.DEVNULL
    with own_files(environ) as complete, contextlib.ExitStack() as stack:
        asked = []
        for group in groups:
            process = subprocess.Popen(
                command(group),
                env=complete,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                start_new_session=True,
            )
            stack.callback(_end, process)
            asked.append(process)
        answers = []
        for process in asked:
            try:
                answers.append(not process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                answers.append(False)
        return answers


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what still waits for a host."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
