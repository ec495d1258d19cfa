"""What a process does when it fails: say who and why, then end at once.

A rank that dies of an uncaught exception would otherwise linger in the launcher's finalisation
while its peers wait for it. Instead every failing process prints its traceback, one last line that
names the rank and the cause, and leaves through ``os._exit`` with a non-zero code, which every
launcher (mpirun, torchrun, smprun) answers by ending the other processes.

Two ways lead here: ``guarded`` runs a whole program (used by smprun), and ``FailureHooks`` covers a
script that was started by another launcher, from ``smp.init`` on.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import json
import os
import socket
import stat
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NoReturn

from smdistributed.modelparallel.common import first_stderr
from smdistributed.modelparallel.common.errors import CommError, SMPError

#: The variable by which smprun asks for failures on stderr as one line that a machine can read. Its
#: value is how many seconds the process then stays.
RECORDS_VARIABLE = "SMP_FAILURE_RECORDS"
#: torchrun names a file here and shows its content as the cause of the failure.
TORCHELASTIC_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_RECORD_MARK = "\x1esmp-failure "
#: Before a rank's last words, with the number of their lines: smprun shows each error once.
_WORDS_MARK = "\x1esmp-last-words "
_SUMMARY_BYTES = 3000  # keeps a record within one atomic write to a pipe
_LONGEST_READ_SECONDS = 2.0
#: What mpirun takes to hand on what it has read.
RELAY_SECONDS = 0.2
_CONSEQUENCE_SECONDS = 1.0


@dataclass(frozen=True)
class FailureRecord:
    """One process's account of its own end.

    Attributes:
        rank: global rank.
        host: name of its host.
        exit_code: the code it leaves with, never 0.
        summary: one line that names the cause.
        blamed_ranks: ranks whose absence caused this failure; empty when the cause lies here.
        time_seconds: wall-clock time of the failure, seconds since the epoch.
    """

    rank: int
    host: str
    exit_code: int
    summary: str
    blamed_ranks: tuple[int, ...]
    time_seconds: float

    def line(self) -> str:
        """Returns the record as one line of text, without the newline."""
        return _RECORD_MARK + json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def parse(line: str) -> FailureRecord | None:
        """Returns the record that a line of output carries, or None for any other line."""
        _, mark, text = line.partition(_RECORD_MARK)
        if not mark:
            return None
        try:
            fields = json.loads(text)
            return FailureRecord(**{**fields, "blamed_ranks": tuple(fields["blamed_ranks"])})
        except (ValueError, TypeError, KeyError):
            return None  # a line of the program that looks like one of ours

    @staticmethod
    def num_last_words(line: str) -> int | None:
        """Returns how many lines of last words follow a line, or None for any other line."""
        _, mark, number = line.partition(_WORDS_MARK)
        return int(number) if mark and number.isdecimal() else None


def exit_status(code: object) -> int:
    """Returns the process exit status that ``sys.exit(code)`` leads to."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    return 1


def leave(
    rank: int,
    summary: str,
    exit_code: int,
    blamed_ranks: tuple[int, ...] = (),
    details: str = "",
) -> NoReturn:
    """Prints details and a last line, tells the launcher the cause, and ends the process at once.

    Nothing after this runs: no ``finally``, no ``atexit``, no destructor; they could wait for
    peers. Output is flushed. A process that fails because of others first gives the launcher a
    moment to end it, so that their words, not its own, are the last on the screen.
    """
    if blamed_ranks:
        time.sleep(_CONSEQUENCE_SECONDS)
    summary = _shortened(" ".join(summary.split()))
    record = FailureRecord(
        rank, socket.gethostname(), exit_code, summary, blamed_ranks, time.time()
    )
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    has_reader = bool(os.environ.get(RECORDS_VARIABLE))
    if first_stderr.is_replaced():  # by a file of the script's own, where one looks for it, too
        with contextlib.suppress(OSError):
            os.write(2, details.encode(errors="replace"))
    if details and has_reader:
        count = details.count("\n")
        details = f"{_WORDS_MARK}{count}\n{details}"
    if details:
        _say(details)
    # One write a line: other ranks write to the same stream.
    _say(f"smp: rank {rank} ({record.host}) failed: {summary}\n")
    if has_reader:
        _say(record.line() + "\n")
    _tell_torchrun(record)
    _let_launcher_read()
    os._exit(exit_code)


def _shortened(text: str) -> str:
    """Leaves out the middle of what no record can hold: the rule comes first, the fix last."""
    kept, half = text, len(text) // 2
    while len(json.dumps(kept, ensure_ascii=False).encode(errors="replace")) > _SUMMARY_BYTES:
        half = half * 9 // 10
        kept = f"{text[:half]} ... {text[-half:]}"
    return kept


#: What frameworks know of their own errors, see ``explaining``.
_explanations: list[Callable[[BaseException], SMPError | None]] = []


@contextlib.contextmanager
def explaining(explain: Callable[[BaseException], SMPError | None]) -> Iterator[None]:
    """Within, a process that ends by an error that ``explain`` knows ends by what it says of it.

    A framework's own transfers and checks raise errors of the framework; which ranks are to blame,
    or what the rule is, is then in their text only.

    Args:
        explain: returns what an error means, or None.
    """
    _explanations.append(explain)
    try:
        yield
    finally:
        _explanations.remove(explain)


#: What is said below the traceback of an error, see ``remarking``.
_remarks: list[Callable[[BaseException], str]] = []


@contextlib.contextmanager
def remarking(remark: Callable[[BaseException], str]) -> Iterator[None]:
    """Within, what ``remark`` knows of an error that ends the process is told below its traceback.

    Args:
        remark: returns lines of text about an error, or "".
    """
    _remarks.append(remark)
    former = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        former(kind, error, tb)  # of a process alone; ``FailureHooks`` come before it in others
        if text := remark(error):
            _say(text)

    sys.excepthook = uncaught
    try:
        yield
    finally:
        _remarks.remove(remark)
        if sys.excepthook is uncaught:
            sys.excepthook = former


def leave_for_exception(rank: int, error: BaseException) -> NoReturn:
    """Prints the traceback of ``error``, and what is known of it, and leaves; see ``leave``."""
    words = "".join(traceback.format_exception(error))
    words += "".join(remark(error) for remark in _remarks)
    meanings = (explain(error) for explain in _explanations)
    error = next((meaning for meaning in meanings if meaning is not None), error)
    blamed = error.missing_ranks if isinstance(error, CommError) else ()
    summary = "".join(traceback.format_exception_only(error)).strip()
    leave(rank, summary, 130 if isinstance(error, KeyboardInterrupt) else 1, blamed, words)


@contextlib.contextmanager
def guarded(rank: Callable[[], int]) -> Iterator[None]:
    """Runs a whole program; any failure in it ends the process with a record.

    Args:
        rank: returns the global rank, asked for only when something failed.
    """
    try:
        yield
    except SystemExit as stop:
        status = exit_status(stop.code)
        if status == 0:
            raise
        words = stop.code + "\n" if isinstance(stop.code, str) else ""
        leave(rank(), f"sys.exit({stop.code!r})", status, details=words)
    except BaseException as error:
        leave_for_exception(rank(), error)


class _Exit(SystemExit):
    """A ``SystemExit`` that notices when the interpreter acts on it.

    The interpreter reads ``code`` from C, with no Python frame above, as it shuts down. A script
    that catches the exception reads it from Python, and then nothing has ended.
    """

    def __init__(self, code: object, on_exit: Callable[[object], None]) -> None:
        super().__init__(code)
        self._exit_code = code
        self._on_exit = on_exit

    @property
    def code(self) -> Any:  # type: ignore[override]
        try:
            sys._getframe(1)
        except ValueError:
            self._on_exit(self._exit_code)
        return self._exit_code


class FailureHooks:
    """The hooks of one process, from ``install`` to ``uninstall``.

    Uncaught exceptions of the main thread leave at once; in other threads they end only the
    thread, as Python has it. ``sys.exit`` with a non-zero code leaves when the interpreter shuts
    down, after the script's own ``finally`` clauses and exit handlers.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._exit_code: object = None
        self._saved_exit = sys.exit
        self._saved_excepthook = sys.excepthook

    def install(self) -> None:
        """Replaces the process's exit and exception hooks."""
        sys.exit = self._exit
        sys.excepthook = self._uncaught
        atexit.register(self._at_exit)

    def renew(self) -> None:
        """Puts the hooks back in front of those that were installed since.

        At exit, later handlers run first: those that leave the job orderly must not run before it
        is known whether this process failed.
        """
        sys.excepthook = self._uncaught
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def uninstall(self) -> None:
        """Puts the former hooks back."""
        sys.exit = self._saved_exit
        sys.excepthook = self._saved_excepthook
        atexit.unregister(self._at_exit)

    def _exit(self, code: object = None) -> NoReturn:
        raise _Exit(code, self._note_exit)

    def _note_exit(self, code: object) -> None:
        self._exit_code = code

    def _at_exit(self) -> None:
        status = exit_status(self._exit_code)
        if status:
            leave(self._rank, f"sys.exit({self._exit_code!r})", status)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        leave_for_exception(self._rank, error.with_traceback(tb))


def _say(text: str) -> None:
    """Writes to the stderr that the launcher reads, whatever a script has in its place."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    first_stderr.write(text)


def _let_launcher_read() -> None:
    """Waits, briefly, until the launcher has taken the last words out of the pipes.

    mpirun stops relaying the output of a process that failed, and loses what it has not read yet.
    """
    deadline = time.monotonic() + _LONGEST_READ_SECONDS
    unread = array.array("i", [0])
    for descriptor in (1, first_stderr.descriptor()):
        with contextlib.suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                continue
            while time.monotonic() < deadline:
                fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                if not unread[0]:
                    break
                time.sleep(0.01)
    time.sleep(float(os.environ.get(RECORDS_VARIABLE) or RELAY_SECONDS))


def _tell_torchrun(record: FailureRecord) -> None:
    path = os.environ.get(TORCHELASTIC_VARIABLE)
    if not path:
        return
    content = {
        "message": {
            "message": f"rank {record.rank} ({record.host}): {record.summary}",
            "extraInfo": {"timestamp": str(int(record.time_seconds))},
        }
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
