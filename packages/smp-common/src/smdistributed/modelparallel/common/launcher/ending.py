"""How ranks end: asked to, and given time for it by SIGTERM in each of them; or by themselves.

mpirun ends its ranks at once when it gets SIGTERM itself. So ``smprun`` sends it a signal that it
forwards to every rank on every host, see ``listening``, and each rank turns that into SIGTERM. A
rank that wants the time says so; where none does in some seconds, the job ends.

A rank that comes to its end says that, too: mpirun may end with exit code 0, and without a word,
when it has lost a host.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from typing import NoReturn

from smdistributed.modelparallel.common import first_stderr

#: What a rank answers that has a handler of SIGTERM; smprun does not show it.
HEARD = "\x1esmp-ending"
#: What a rank says last; smprun does not show it.
ENDED = "\x1esmp-ended"


def say_at_end() -> None:
    """Has this process say that it came to its end, whatever its exit code, after all else.

    Not its children: those that are forked have its exit handlers.
    """
    own, leave = os.getpid(), os._exit

    def say() -> None:
        if os.getpid() == own:
            first_stderr.write(f"{ENDED}\n")

    def saying(status: int) -> NoReturn:
        say()
        leave(status)

    atexit.register(say)
    os._exit = saying


class EndRequest:
    """The request of smprun to end, as one rank sees it.

    Attributes:
        has_come: whether it has come.
    """

    def __init__(self) -> None:
        self.has_come = False

    def come(self) -> None:
        """Turns the request into SIGTERM for this process, once.

        A rank without a handler of SIGTERM shall not wait for its peers before it ends.
        """
        if self.has_come:
            return
        self.has_come = True
        if callable(signal.getsignal(signal.SIGTERM)):
            first_stderr.write(f"{HEARD}\n")
        # To the main thread, whose sleep it ends. One to the process the thread that listens may
        # take itself, and the handler would run when the main thread wakes.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
