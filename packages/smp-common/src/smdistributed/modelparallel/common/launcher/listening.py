"""Signals by which ``smprun`` asks its ranks for something, on every host: mpirun hands them on.

Those that are used no program uses for itself, and they are ignored where nobody waits for them: by
mpirun that is not up yet, and by what ranks start.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping

#: Asks a rank to end, see ``ending``.
END_SIGNAL = signal.SIGURG
#: Asks a rank where it is, see ``status``. The terminal of a rank is mpirun's: its size stays.
STATUS_SIGNAL = signal.SIGWINCH
#: What mpirun is told; the list takes the place of its own. It knows few signals by their names.
FORWARDING = ("--forward-signals", f"SIGUSR1,SIGUSR2,{END_SIGNAL.name},{STATUS_SIGNAL:d}")


def listen(answers: Mapping[signal.Signals, Callable[[], object]]) -> None:
    """Answers signals of this process, each time that they come.

    In a thread of its own: Python runs handlers of signals between two instructions of the main
    thread, and a rank that waits for its peers shall answer nevertheless.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, answers)

    def answer() -> None:
        while True:
            answers[signal.Signals(signal.sigwait(answers))]()

    threading.Thread(target=answer, name="smp-asked", daemon=True).start()
