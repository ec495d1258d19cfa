"""Runs mpirun and sees to it that the job ends: soon after its first failure, and wholly."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from smdistributed.modelparallel.common.launcher import processes, standard_input
from smdistributed.modelparallel.common.launcher.command import own_files
from smdistributed.modelparallel.common.launcher.first_failure import (
    ASKED,
    Verdict,
    ended_by,
    judge,
)
from smdistributed.modelparallel.common.launcher.listening import END_SIGNAL, STATUS_SIGNAL
from smdistributed.modelparallel.common.launcher.output import Relay, Screen
from smdistributed.modelparallel.common.launcher.status import Desk

TIMEOUT_EXIT_CODE = 124
#: What ends a job.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: A program's own: mpirun hands them to every rank.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: What asks where the ranks are, as it asks some other runtimes: ctrl-\\ of a terminal.
_ASKING = (signal.SIGQUIT,)
#: A rank that has only just started does not listen yet.
_ASK_AGAIN_SECONDS = 1.0
#: Then a rank with a handler of SIGTERM has said that it heard; one without has ended.
_HEAR_SECONDS = 10.0
#: mpirun needs one to three seconds to end the others by itself.
_GRACE_SECONDS = 4.0
_TERMINATE_SECONDS = 3.0
_TICK_SECONDS = 0.1
_PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What time a job has.

    Attributes:
        timeout_seconds: after which the job is ended; None for no limit.
        grace_seconds: what ranks have between SIGTERM and their end.
        started_seconds: since when it runs, restarts included, by the monotonic clock.
    """

    timeout_seconds: float | None = None
    grace_seconds: float = 0.0
    started_seconds: float = field(default_factory=time.monotonic)

    @property
    def are_over(self) -> bool:
        """Whether the job has had its time."""
        passed = time.monotonic() - self.started_seconds
        return self.timeout_seconds is not None and passed > self.timeout_seconds


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    hosts: Sequence[str],
    limits: Limits,
    on_configuration: Callable[[Mapping[str, Any]], object],
) -> Verdict:
    """Runs a job to its end and returns how it ended.

    Args:
        command: mpirun's command line.
        environ: its environment.
        hosts: host of each rank.
        limits: of its time.
        on_configuration: is called with the parameters that rank 0 tells.
    """
    relay = Relay(Screen(sys.stdout.buffer, sys.stderr.buffer, len(hosts)))
    relay.on_configuration = on_configuration
    with own_files(environ) as complete:
        own = {k: v for k, v in complete.items() if k != standard_input.VARIABLE}
        own |= standard_input.offered(hosts, command)
        running = _RunningJob(command, own, relay, limits, hosts)
        with running.desk, running:
            running.wait()
    verdict = running.verdict(hosts)
    relay.show_last_words(verdict.traceback_rank)
    return verdict


class _RunningJob:
    """mpirun from its start to the death of the last process below it.

    Used as a context manager: leaving it, on whatever path, kills what is left.

    Attributes:
        desk: where it is asked where the ranks are.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        relay: Relay,
        limits: Limits,
        hosts: Sequence[str],
    ) -> None:
        self._command = command
        self._environ = environ
        self._relay = relay
        self._limits = limits
        self.desk = Desk(hosts, self._ask_where)
        relay.on_whereabouts = self.desk.take
        self._asked_at: float | None = None
        self._ask_at = 0.0
        self._asked: Verdict | None = None
        self._signalled = False
        self._kill_at: float | None = None
        self._terminate_at: float | None = None

    def __enter__(self) -> _RunningJob:
        processes.become_reaper()
        self._strangers = processes.descendants(os.getpid())
        self._selector = selectors.DefaultSelector()
        self._handlers = {
            number: signal.signal(number, handler)
            for numbers, handler in (
                (ENDING, self._on_signal),
                (_PASSED_ON, self._pass_on),
                (_ASKING, lambda *_: self.desk.ask_here()),
            )
            for number in numbers
            # Ignored signals stay ignored, as under nohup. But shells have what scripts start with
            # & ignore SIGQUIT, and who sends that asks; it ends nothing.
            if number in _ASKING or signal.getsignal(number) is not signal.SIG_IGN
        }
        out, err = _message_pipe(), _message_pipe()
        self._selector.register(out[0], selectors.EVENT_READ, False)
        self._selector.register(err[0], selectors.EVENT_READ, True)
        try:
            self._mpirun = subprocess.Popen(
                self._command,
                env=dict(self._environ),
                # None is that of this process.
                stdin=subprocess.DEVNULL if standard_input.VARIABLE in self._environ else None,
                stdout=out[1].fileno(),
                stderr=err[1].fileno(),
                start_new_session=True,  # a ctrl-c reaches it through us alone
                preexec_fn=processes.end_with_parent,
            )
        except BaseException:
            self._close()
            raise
        finally:
            out[1].close()
            err[1].close()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            processes.kill_descendants(self._strangers)
        finally:
            self._close()

    def wait(self) -> None:
        """Relays output until mpirun has ended and its output is read."""
        while self._mpirun.poll() is None:
            self._relay_output(_TICK_SECONDS)
            self._hurry()
            self.desk.look()
        # Helpers of mpirun may hold its streams open: read what there is, no longer.
        while self._relay_output(_TICK_SECONDS):
            pass
        self._relay.finish()

    def verdict(self, hosts: Sequence[str]) -> Verdict:
        """Returns how the job ended."""
        if self._asked is not None:
            return self._asked
        relay = self._relay
        verdict = judge(
            relay.records,
            relay.banners,
            self._mpirun.returncode,
            hosts,
            lost_host=relay.lost_host,
            is_refused=relay.has_refused,
            ended=relay.ended,
        )
        return replace(verdict, final_because=ASKED) if self._signalled else verdict

    def _relay_output(self, timeout_seconds: float) -> bool:
        """Passes on what is there, or waits for it; returns whether anything came."""
        came = False
        for key, _ in self._selector.select(timeout_seconds):
            for piece in _pieces(key.fileobj):
                if piece:
                    came = True
                    self._relay.feed(key.data, piece)
                else:
                    self._selector.unregister(key.fileobj)
        if not came:
            self._relay.idle()
        return came

    def _hurry(self) -> None:
        """Ends mpirun when it does not end the job by itself in time."""
        now = time.monotonic()
        if self._limits.are_over:
            self._ask_to_end(
                Verdict(
                    TIMEOUT_EXIT_CODE,
                    f"the job did not end within {self._limits.timeout_seconds:g} s and was ended "
                    f"(exit code {TIMEOUT_EXIT_CODE})",
                    final_because="its time was over",
                )
            )
        if self._asked_at is not None:
            patience = self._limits.grace_seconds
            if not self._relay.is_ending:
                patience = min(patience, _HEAR_SECONDS)
            if now > self._asked_at + patience:
                self._end_mpirun()
            elif now > self._ask_at:
                self._ask_at = now + _ASK_AGAIN_SECONDS
                self._mpirun.send_signal(END_SIGNAL)
        if self._relay.records and self._terminate_at is None:
            self._terminate_at = now + _GRACE_SECONDS
        if self._terminate_at is not None and now > self._terminate_at:
            self._end_mpirun()
        if self._kill_at is not None and now > self._kill_at:
            # The rest dies when this context is left.
            self._mpirun.kill()

    def _ask_to_end(self, verdict: Verdict) -> None:
        """Ends the job for a reason from outside; that is its verdict unless a rank failed."""
        self._note_asked(verdict)
        self._end_mpirun()

    def _note_asked(self, verdict: Verdict) -> None:
        if self._kill_at is None and not self._relay.records:
            self._asked = verdict

    def _end_mpirun(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + _TERMINATE_SECONDS
            self._mpirun.terminate()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signalled:
            self._kill_at = 0.0
            return
        self._signalled = True
        verdict = ended_by(number)
        if number == signal.SIGTERM and self._limits.grace_seconds and not self._relay.records:
            self._note_asked(verdict)
            self._asked_at = time.monotonic()
        else:
            self._ask_to_end(verdict)

    def _ask_where(self) -> None:
        self._mpirun.send_signal(STATUS_SIGNAL)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._mpirun.send_signal(number)

    def _close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


def _message_pipe() -> tuple[socket.socket, socket.socket]:
    """Returns the reading and the writing end of a pipe that keeps single writes apart."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    reader.setblocking(False)
    return reader, writer


def _pieces(reader: object) -> Iterator[bytes]:
    """Yields what can be read without waiting; an empty piece is the end of the stream."""
    assert isinstance(reader, socket.socket)
    with contextlib.suppress(BlockingIOError):
        while True:
            try:
                piece = reader.recv(_PIECE_BYTES)
            except ConnectionResetError:
                piece = b""
            yield piece
            if not piece:
                return
