"""A rank of mpirun that has a copy of a server's process do its work.

Each one asks a ``fork_server`` for a process with its environment, folder, cores and streams,
which so joins the job in its place: for MPI a rank is what its environment says. Signals that come
here go on to the copy, and the end of each is the end of the other, with its exit code or signal.

Run as a file, by an interpreter that looks for no packages: it starts in a twentieth of a second.

Usage: stand_in.py ADDRESS PROGRAM ARGUMENTS
"""

import _socket
import marshal
import os
import signal
import sys

_REQUEST_BYTES = 1 << 18
_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGURG, signal.SIGWINCH),  # by which smprun asks, see ``listening``
)


def main() -> None:
    """Stands in for a process; ends as it does."""
    address, *program = sys.argv[1:]
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    link.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, _REQUEST_BYTES)
    link.connect(address)
    cores = tuple(os.sched_getaffinity(0))
    request = (1, tuple(program), dict(os.environ), os.getcwd(), None, cores)
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    link.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    if message := link.recv(_REQUEST_BYTES):
        copy = marshal.loads(message)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(copy, number))
        message = link.recv(_REQUEST_BYTES)
    # A server that dies takes its copies with it.
    _, code = marshal.loads(message) if message else (0, -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
