"""How ranks are asked to end, and given time for it: SIGTERM in each of them.

mpirun itself ends its ranks at once when it gets SIGTERM. But it forwards other signals to every
rank on every host. So smprun sends it one that no program uses for itself, and each rank turns that
into SIGTERM. Ranks that want the time say so; where none does in some seconds, the job ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

#: Ignored where nobody waits for it: by mpirun that is not up yet, and by what ranks start.
END_SIGNAL = signal.SIGURG
#: What a rank answers that has a handler of SIGTERM; smprun does not show it.
HEARD = "\x1esmp-ending"
#: What mpirun is told; the list takes the place of its own.
FORWARDING = ("--forward-signals", f"SIGUSR1,SIGUSR2,{END_SIGNAL.name}")


class EndRequest:
    """The request of smprun to end, as one rank sees it.

    Attributes:
        has_come: whether it has come.
    """

    def __init__(self) -> None:
        self.has_come = False

    def listen(self) -> None:
        """Turns the request into SIGTERM for this process, once.

        In a thread of its own: Python runs handlers of signals between two instructions of the main
        thread, and a rank without a handler of SIGTERM shall not wait for its peers before it ends.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, (END_SIGNAL,))
        threading.Thread(target=self._listen, name="smp-end", daemon=True).start()

    def _listen(self) -> None:
        signal.sigwait((END_SIGNAL,))
        self.has_come = True
        if callable(signal.getsignal(signal.SIGTERM)):
            with contextlib.suppress(OSError):
                os.write(2, f"{HEARD}\n".encode())
        os.kill(os.getpid(), signal.SIGTERM)
