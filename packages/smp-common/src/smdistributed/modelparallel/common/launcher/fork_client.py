"""Starting the process that is copied for each rank; see ``fork_server``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.launcher.fork_server import REQUEST_BYTES, Request

#: Not with -m: the classes of requests would be others there than here. What lies in the present
#: folder is not what is imported.
_SERVER = "import sys; del sys.path[0]; sys.path += {}; from {} import main; kept = main()"
_MOST_WAITING = 4096


class ForkServer:
    """A process that has imported modules and forks itself on request. A context manager.

    Args:
        preload: what it imports.
        environ: its environment.

    Attributes:
        address: of the socket at which stand-ins of ranks ask.

    Raises:
        SMPError: what is to be imported cannot be, or is not safe to copy.
    """

    def __init__(self, preload: Sequence[str], environ: Mapping[str, str]) -> None:
        self._words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._folder = tempfile.TemporaryDirectory(prefix="smp-fork-", ignore_cleanup_errors=True)
        self.address = os.path.join(self._folder.name, "door")
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        # What to import may be found where this process looks.
        program = _SERVER.format(sys.path, Request.__module__)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(self.address)
            door.listen(_MOST_WAITING)
            descriptors = [theirs.fileno(), door.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program, *map(str, descriptors), *preload],
                pass_fds=descriptors,
                env=dict(environ),
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
            raise SMPError(
                f"{', '.join(preload)} must be importable in a process that is copied; it ended:\n"
                f"{words}"
            )

    @property
    def is_alive(self) -> bool:
        """Whether it can fork; also in a copy of the process that has started it."""
        try:
            return bool(self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True  # it says nothing, and has not left
        except OSError:
            return False

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and all that it forked."""
        self._link.close()
        self._process.wait()
        self._words.close()
        self._folder.cleanup()
