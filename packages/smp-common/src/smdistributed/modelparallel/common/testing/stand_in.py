"""A rank of a real job of smprun that has a copy of a server's process do its work.

The launcher ``smprun-fork`` gives this program to smprun in the place of the one to run. Each rank
asks a ``fork_server`` for a process with its environment and output, which so joins the job in its
place: for MPI a rank is what its environment says. Signals that come here go on to the copy, and
the end of each is the end of the other, with its exit code or signal.

Usage: stand_in ADDRESS PROGRAM ARGUMENTS
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys

from smdistributed.modelparallel.common.testing.fork_server import (
    REQUEST_BYTES,
    Ending,
    Request,
)

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Stands in for a process; ends as it does."""
    address, *program = sys.argv[1:]
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    link.connect(address)
    request = Request(1, tuple(program), dict(os.environ), os.getcwd(), port=None)
    socket.send_fds(link, [pickle.dumps(request)], [1, 2])
    if message := link.recv(REQUEST_BYTES):
        copy = pickle.loads(message)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(copy, number))
        message = link.recv(REQUEST_BYTES)
    # A server that dies takes its copies with it.
    ending = pickle.loads(message) if message else Ending(0, -signal.SIGKILL)
    if ending.code < 0:
        if -ending.code != signal.SIGKILL:
            signal.signal(-ending.code, signal.SIG_DFL)
        os.kill(os.getpid(), -ending.code)
    os._exit(ending.code)


if __name__ == "__main__":
    main()
