"""A process that has imported a framework and copies itself: its copies are the ranks of jobs.

Importing a framework takes seconds, a copy of a process milliseconds. ``smprun --fork`` has mpirun
start small processes that each ask for a copy, see ``stand_in``. Tests ask for the ranks of a job
at once, which have torchrun's environment, or that of ``python`` alone if there is one, and of
which one that fails ends the others. Only what is safe to fork may be imported: PyTorch and
TensorFlow are, as long as nothing computes; MPI is not, nor what starts threads. All ranks have the
server's hash seed, and what a framework reads of its environment when it is imported is that of the
server.
A module that is imported for them may have a function ``prepare``, for what each of them would do
once: a copy that looks at all objects has its own pages of all.

No rank outlives the server, and the server ends with the process that started it. A copy whose
program has ended well runs its exit handlers, writes what its files hold back, and ends there: to
take all apart that it was copied with takes four times as long as to copy it, so the finalizers of
that do not run either.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import selectors
import signal
import socket
import sys
import threading
import weakref
from dataclasses import dataclass, field

from smdistributed.modelparallel.common.failure import exit_status
from smdistributed.modelparallel.common.launcher import bootstrap

#: The longest request: an environment and a command line.
REQUEST_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 0.01
_SEARCHED = "PYTHONPATH"


@dataclass(frozen=True)
class Request:
    """What to start.

    Attributes:
        num_ranks: how many processes.
        program: a script and its arguments.
        environ: all that is in their environment, but for what torchrun sets.
        folder: where they work.
        port: where they meet; None for a process that has a launcher already.
        cores: that they may use; none for the server's.
    """

    num_ranks: int
    program: tuple[str, ...]
    environ: dict[str, str]
    folder: str
    port: int | None
    cores: tuple[int, ...] = ()

    def packed(self) -> bytes:
        """Returns what is sent; of plain values, for who has imported nothing."""
        fields = (self.num_ranks, self.program, self.environ, self.folder, self.port, self.cores)
        return marshal.dumps(fields)

    def environ_of(self, rank: int) -> dict[str, str]:
        """Returns the environment of one rank."""
        if self.num_ranks == 1:
            return self.environ
        return self.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "fork",
        }


@dataclass(frozen=True)
class Ending:
    """How a job ended: the rank that failed first, and its exit code as ``Popen`` has it."""

    rank: int
    code: int

    def packed(self) -> bytes:
        """Returns what is sent."""
        return marshal.dumps((self.rank, self.code))


@dataclass
class _Job:
    """Ranks by the process ids of those that run, and what became of the first that failed."""

    link: socket.socket
    alive: dict[int, int] = field(default_factory=dict)
    ending: Ending = field(default_factory=lambda: Ending(0, 0))

    def reap(self) -> None:
        """Takes note of ranks that have ended; one that failed ends the others."""
        for pid, rank in list(self.alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.alive[pid]
                code = os.waitstatus_to_exitcode(status)
                _kill_group(pid)  # what the rank has started itself
                if code and not self.ending.code:
                    self.ending = Ending(rank, code)
                    self.kill()

    def kill(self) -> None:
        """Kills every rank."""
        for pid in self.alive:
            _kill_group(pid)
            with contextlib.suppress(ProcessLookupError):  # before it has a group of its own
                os.kill(pid, signal.SIGKILL)

    def tell(self) -> None:
        """Says how the job ended, unless nobody wants to know any more."""
        with self.link, contextlib.suppress(OSError):
            self.link.send(self.ending.packed())


class _Server:
    """Waits for requests, in the one thread of a process that may be copied at any moment.

    Args:
        link: to its client, who asks for jobs, and with whom it ends.
        door: where stand-ins of ranks ask for a process each.
    """

    def __init__(self, link: socket.socket, door: socket.socket) -> None:
        self._link, self._door = link, door
        self._jobs: list[_Job] = []
        self._selector = selectors.DefaultSelector()
        for each in (link, door):
            self._selector.register(each, selectors.EVENT_READ, None)

    def serve(self) -> Request | None:
        """Returns in each new rank what it has to run; in the server itself None, at the end."""
        while True:
            for key, _ in self._selector.select(_TICK_SECONDS if self._jobs else None):
                job = key.data
                if job is not None:  # nobody writes there: the client has given the job up
                    self._selector.unregister(key.fileobj)
                    job.kill()
                    continue
                if key.fileobj is self._door:
                    link, _ = self._door.accept()
                    data, streams, _, _ = socket.recv_fds(link, REQUEST_BYTES, 3)
                else:
                    data, descriptors, _, _ = socket.recv_fds(self._link, REQUEST_BYTES, 3)
                    if not data:
                        self._end()
                        return None
                    link, streams = socket.socket(fileno=descriptors[0]), descriptors[1:]
                if data:  # a stand-in may have been killed before it asked
                    request = self._start(Request(*marshal.loads(data)), link, streams)
                    if request is not None:
                        return request
            self._reap()

    def _start(self, request: Request, link: socket.socket, streams: list[int]) -> Request | None:
        job = _Job(link)
        server = os.getpid()
        for rank in range(request.num_ranks):
            pid = os.fork()
            if pid == 0:
                self._leave(job)
                os.chdir(request.folder)
                if request.cores:
                    os.sched_setaffinity(0, request.cores)
                _become_rank(request.environ_of(rank), streams, server)
                return request
            job.alive[pid] = rank
        for stream in streams:
            os.close(stream)
        if request.port is None:
            with contextlib.suppress(OSError):
                link.send(marshal.dumps(next(iter(job.alive))))
        self._jobs.append(job)
        self._selector.register(job.link, selectors.EVENT_READ, job)
        return None

    def _leave(self, job: _Job) -> None:
        """Closes, in a copy, what is the server's."""
        self._selector.close()
        self._link.close()
        self._door.close()
        for each in (*self._jobs, job):
            each.link.close()

    def _reap(self) -> None:
        for job in list(self._jobs):
            job.reap()
            if not job.alive:
                self._jobs.remove(job)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(job.link)
                job.tell()

    def _end(self) -> None:
        for job in self._jobs:
            job.kill()


def _become_rank(environ: dict[str, str], streams: list[int], server: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    # Its input too, where it has one of its own.
    for number, stream in zip((0, 1, 2)[-len(streams) :], streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()  # as in a process of its own; Python's own generator does so itself
    before = os.environ.get(_SEARCHED)
    os.environ.clear()
    os.environ.update(environ)
    if environ.get(_SEARCHED) != before:
        _look_first(environ.get(_SEARCHED, ""))


def _look_first(search: str) -> None:
    """Has this copy find modules on a path of its own, also those that the server has imported."""
    places = [place for place in search.split(os.pathsep) if os.path.isdir(place)]
    sys.path[1:1] = places  # the first one is the program's
    own = {name.partition(".")[0] for place in places for name in os.listdir(place)}
    for name in list(sys.modules):
        if name.partition(".")[0] in own:
            del sys.modules[name]
    importlib.invalidate_caches()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _end_here(has_ended_well: threading.Event) -> None:
    """Ends a copy at once; the last of its exit handlers."""
    mpi = sys.modules.get("mpi4py.MPI")
    # Nobody but mpi4py ends MPI for a program that has left that to it, and only later than this.
    is_done = mpi is None or not mpi.Is_initialized() or mpi.Is_finalized()
    if has_ended_well.is_set() and is_done:
        _write_back()
        os._exit(0)


def _write_back() -> None:
    """Writes what open files still hold, as their ends would at the end of an interpreter."""
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()


def main() -> object:
    """Serves; and in each copy of the process runs the program of a request.

    A copy returns from here and ends with its exit handlers.
    """
    has_ended_well = threading.Event()
    # Handlers run in the reverse order: this one after those of what is imported.
    atexit.register(_end_here, has_ended_well)
    link, door = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    gc.disable()  # what is imported stays: to look through it time and again takes a second
    preloaded = [importlib.import_module(name) for name in sys.argv[3:]]
    gc.collect()
    gc.freeze()
    gc.enable()
    for module in preloaded:
        if prepare := vars(module).get("prepare"):
            prepare()
    # What copies share with the server they need not take apart, each for itself, at their end.
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        finalizer.atexit = False
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            f"importing {', '.join(sys.argv[3:])} started threads: no copy has them."
        )
    sys.path.insert(0, "")  # as Python has it; a script puts its own folder there
    link.send(b"r")
    request = _Server(link, door).serve()
    if request is None:
        os._exit(0)  # without exit handlers of what was imported: nothing has been done with it
    try:
        if request.port is None:
            sys.argv = [bootstrap.__file__, *request.program]
            kept = bootstrap.main()
        else:
            kept = bootstrap.run(list(request.program))
    except SystemExit as stop:
        if not exit_status(stop.code):
            has_ended_well.set()
        raise
    has_ended_well.set()
    return kept
