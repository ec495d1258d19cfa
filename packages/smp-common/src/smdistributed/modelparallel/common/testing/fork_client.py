"""Starting processes by forking a server that has imported what they need; see ``fork_server``."""

from __future__ import annotations

import atexit
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from smdistributed.modelparallel.common.comm.addresses import free_port
from smdistributed.modelparallel.common.launcher.first_failure import Banner
from smdistributed.modelparallel.common.testing.fork_server import REQUEST_BYTES, Ending, Request

#: Unless the environment says how many: processes share few cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Not with -m: the classes of requests would be others there than here.
_SERVER = "import sys; sys.path += {}; from {} import main; kept = main()"


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
        ending = pickle.loads(message) if message else Ending(0, -signal.SIGKILL)
        self.returncode = ending.code
        if ending.code:
            number = -ending.code if ending.code < 0 else None
            code = ending.code if ending.code > 0 else None
            self.banner = Banner(ending.rank, signal_number=number, exit_code=code)


class ForkServer:
    """A process that has imported modules and forks itself on request.

    Attributes:
        address: of the socket at which stand-ins of ranks ask.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._folder = tempfile.TemporaryDirectory(prefix="smp-fork-", ignore_cleanup_errors=True)
        self.address = os.path.join(self._folder.name, "door")
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        # What to import may be found where this process looks.
        program = _SERVER.format(sys.path, Request.__module__)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(self.address)
            door.listen()
            descriptors = [theirs.fileno(), door.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program, *map(str, descriptors), *preload],
                pass_fds=descriptors,
                env={**os.environ, **ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                start_new_session=True,
            )
        if not self._link.recv(1):
            self._process.wait()
            self._words.seek(0)
            words = self._words.read()
            self.close()
            raise RuntimeError(f"the server of launcher 'fork' ended:\n{words}")

    @property
    def is_alive(self) -> bool:
        """Whether it can fork; also in a copy of the process that has started it."""
        try:
            return bool(self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True  # it says nothing, and has not left
        except OSError:
            return False

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
            socket.send_fds(self._link, [pickle.dumps(request)], [theirs.fileno(), *streams])
        return ForkedProcesses(ours)

    def close(self) -> None:
        """Ends the server and all that it forked."""
        self._link.close()
        self._process.wait()
        self._words.close()
        self._folder.cleanup()


_servers: dict[tuple[str, ...], ForkServer] = {}


def server_with(preload: tuple[str, ...]) -> ForkServer:
    """Returns this process's server that has imported these modules; starts it if need be."""
    server = _servers.get(preload)
    if server is None or not server.is_alive:
        server = _servers[preload] = ForkServer(preload)
        atexit.register(server.close)
    return server
