"""Starting ranks by forking a server that has imported what they need; see its module."""

from __future__ import annotations

import atexit
import marshal
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from smdistributed.modelparallel.common.comm.addresses import free_port
from smdistributed.modelparallel.common.launcher.first_failure import Banner
from smdistributed.modelparallel.common.launcher.fork_client import ForkServer
from smdistributed.modelparallel.common.launcher.fork_server import REQUEST_BYTES, Ending, Request

#: Unless the environment says how many: processes share few cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ForkedProcesses:
    """A job that a server forked.

    Attributes:
        pid: 0: there is no launcher.
        returncode: of the process that failed first, 0 if none did; None while one runs.
        banner: which one that was, and how it ended.
    """

    pid = 0

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.returncode: int | None = None
        self.banner: Banner | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits until every process has ended.

        Raises:
            subprocess.TimeoutExpired: some have not, in time.
        """
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self._note(self._link.recv(REQUEST_BYTES))
            self._link.close()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Kills every process."""
        if self.returncode is None:
            self._link.shutdown(socket.SHUT_WR)

    def _note(self, message: bytes) -> None:
        # A server that dies takes its children with it.
        ending = Ending(*marshal.loads(message)) if message else Ending(0, -signal.SIGKILL)
        self.returncode = ending.code
        if ending.code:
            number = -ending.code if ending.code < 0 else None
            code = ending.code if ending.code > 0 else None
            self.banner = Banner(ending.rank, signal_number=number, exit_code=code)


class RanksServer(ForkServer):
    """A server that tests ask for the ranks of a job at once."""

    def fork(
        self,
        num_ranks: int,
        program: Sequence[str],
        environ: Mapping[str, str],
        streams: tuple[int, int],
    ) -> ForkedProcesses:
        """Starts processes.

        Args:
            num_ranks: how many.
            program: a script and its arguments.
            environ: all that is in their environment, but for what torchrun sets.
            streams: descriptors of their standard output and error.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = Request(num_ranks, tuple(program), dict(environ), os.getcwd(), free_port())
        with theirs:
            socket.send_fds(self._link, [request.packed()], [theirs.fileno(), *streams])
        return ForkedProcesses(ours)


_servers: dict[tuple[str, ...], RanksServer] = {}


def server_with(preload: tuple[str, ...]) -> RanksServer:
    """Returns this process's server that has imported these modules; starts it if need be."""
    server = _servers.get(preload)
    if server is None or not server.is_alive:
        server = _servers[preload] = RanksServer(preload, {**os.environ, **ONE_THREAD})
        atexit.register(server.close)
    return server
