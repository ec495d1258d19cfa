"""Runs a script, and ends it when the supervisor of its job is gone.

``python -m ... GRACE PARENT WORD...``: the seconds that it has, the supervisor, the command.
The kernel asks this process to end when its parent does; so asked it asks the script, gives it that
time, and then ends it with everything below it. A script that does not listen would go on for ever
otherwise. While the supervisor lives, times are its own affair.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from smdistributed.modelparallel.common.launcher import processes

_MODULE = "smdistributed.modelparallel.launch.job.warden"
_TICK_SECONDS = 0.1


def guarded(words: Sequence[str], grace_seconds: float) -> tuple[str, ...]:
    """Returns the command line that runs another one so, below this process."""
    return (sys.executable, "-m", _MODULE, f"{grace_seconds:g}", str(os.getpid()), *words)


class _Warden:
    """Runs one command."""

    def __init__(self, grace_seconds: float, parent: int) -> None:
        self._grace_seconds = grace_seconds
        self._parent = parent
        self._is_asked = False
        self._is_told = False
        self._kill_at: float | None = None

    def run(self, words: Sequence[str]) -> int:
        """Runs it; returns its exit code, negative for a signal."""
        processes.become_reaper()
        signal.signal(signal.SIGTERM, self._ask)
        with subprocess.Popen(words, preexec_fn=processes.end_with_parent) as process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK_SECONDS)
                    break
                self._look_after(process)
        processes.kill_descendants(set())
        return process.returncode

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def _look_after(self, process: subprocess.Popen[bytes]) -> None:
        is_alone = os.getppid() != self._parent
        if (self._is_asked or is_alone) and not self._is_told:
            self._is_told = True
            process.terminate()
        if is_alone and self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            process.kill()


def main(words: list[str]) -> int:
    """Runs a command; ends as it does."""
    code = _Warden(float(words[0]), int(words[1])).run(words[2:])
    if code < 0:
        # Whoever waits shall see the same signal, and one picture of memory is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
