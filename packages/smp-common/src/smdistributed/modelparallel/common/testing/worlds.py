"""A pool of worlds: jobs that stay alive for a test session and run one test's body after another.

Starting a job costs seconds, and a test's body milliseconds. A ``World`` says what job a test
needs; ``Worlds`` starts it the first time, keeps it, and ends the one that was used longest ago
when too many processes would live at once. With the plugin of this package the pool of a session
is the fixture ``worlds``::

    def start(config):                   # once on each rank of a new world
        smp.init(config)
        return lambda: torch.manual_seed(0)  # before each body; or return nothing

    PIPELINE = World(2, start, ({"pipeline_parallel_degree": 2},))

    def body(number):                    # at the top level of a module
        return smp.rank() + number

    def test_numbers(worlds):
        assert worlds.run(PIPELINE, body, 10, timeout=30) == (10, 11)

A body that raises on some rank, ends a process or takes too long fails its own test, with the
traceback of the rank that failed first, and poisons its world: the next test gets a new one.
Nothing outlives the pool, nor the process that has it, however that ends.

What a body changes in its processes stays changed for those after it: what needs a fresh process,
or ends one, is for ``run_ranks``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import socket
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.testing import rank_loop
from smdistributed.modelparallel.common.testing.calls import Call
from smdistributed.modelparallel.common.testing.jobs import Job, Launcher
from smdistributed.modelparallel.common.testing.rank_loop import Reply, Task
from smdistributed.modelparallel.common.testing.run_ranks import Outcome, RanksFailedError

_START_SECONDS = 150.0
#: What the other ranks of a failed body get to fail too, as one of them may have been the first.
_LAST_WORDS_SECONDS = 3.0
_END_SECONDS = 20.0
_STACKS_SECONDS = 0.5
_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class World:
    """A job that runs bodies one after another; equal worlds are one job.

    Attributes:
        num_ranks: how many processes.
        setup: a function at the top level of a module, called once on each rank; what it returns,
            if anything, is called before each body.
        args: its arguments; they can be pickled.
        launcher: what starts the processes.
        env: variables to set, or to unset where the value is None.
        preload: modules that processes of launchers ``fork`` and ``smprun-fork`` have from their
            beginning.
        settings: arguments of what ``setup`` returned, which can be pickled; worlds that differ in
            these alone are one job.
    """

    num_ranks: int
    setup: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    launcher: Launcher = "smprun"
    env: Mapping[str, str | None] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    settings: tuple[object, ...] = ()

    @property
    def key(self) -> bytes:
        """What two worlds share if one job can be both."""
        setup = self.setup and (inspect.getfile(self.setup), self.setup.__name__)
        rest = (self.args, self.launcher, sorted(self.env.items()), self.preload)
        return pickle.dumps((self.num_ranks, setup, *rest))


class Worlds:
    """The worlds that live at present.

    Args:
        most_ranks: how many processes may live at once; a world may have more when it is alone.
    """

    def __init__(self, most_ranks: int = 12) -> None:
        self._most_ranks = most_ranks
        self._running: OrderedDict[bytes, _Running] = OrderedDict()
        self._troubles: list[str] = []

    def run(
        self,
        world: World,
        body: Callable[..., object],
        *args: object,
        timeout: float = 60.0,
    ) -> tuple[Any, ...]:
        """Calls a body on every rank of a world.

        Args:
            world: where; it is started if it does not live.
            body: a function at the top level of a module.
            args: its arguments; they can be pickled.
            timeout: seconds after which the world is ended; the start of a world is not counted.

        Returns:
            what the body returned, by rank.

        Raises:
            RanksFailedError: it failed, or the world did not start.
        """
        task = Task(Call.to(body, args), settings=world.settings)
        key = world.key
        try:
            if key not in self._running:
                self._make_room(world.num_ranks)
                self._running[key] = _Running(world)
                self._running[key].set_up()
            self._running.move_to_end(key)
            return self._running[key].ask(task, timeout)
        except BaseException:
            # Also an interruption: nobody knows what the ranks are doing now.
            self.drop(world)
            raise

    def drop(self, world: World) -> None:
        """Ends a world at once, whose ranks may not be at one: the next body starts another."""
        if world.key in self._running:
            self._running.pop(world.key).kill()

    def close(self) -> None:
        """Ends all worlds.

        Raises:
            RanksFailedError: a world, also one that was ended before, did not end well.
        """
        for running in self._running.values():
            running.dismiss()
        while self._running:
            self._end_oldest()
        if self._troubles:
            words, self._troubles = "\n".join(self._troubles), []
            raise RanksFailedError(words, Outcome((), 1, "", "", 0.0))

    def _make_room(self, num_ranks: int) -> None:
        def living() -> int:
            return sum(running.world.num_ranks for running in self._running.values())

        while self._running and living() + num_ranks > self._most_ranks:
            self._end_oldest()

    def _end_oldest(self) -> None:
        _, running = self._running.popitem(last=False)
        running.dismiss()
        if trouble := running.end():
            self._troubles.append(trouble)


class _Running:
    """The job of a world, with a connection to each rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._connections: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}
        self._is_dismissed = False
        self._folder = tempfile.TemporaryDirectory(prefix="smp-world-", ignore_cleanup_errors=True)
        address = os.path.join(self._folder.name, "owner")
        script = Path(self._folder.name, "rank.py")
        script.write_text(f"from {rank_loop.__name__} import serve\n\nserve({address!r})\n")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(world.num_ranks)
        self._listener.settimeout(_TICK_SECONDS)
        self._begin = time.monotonic()
        self._job = Job(world.launcher, world.num_ranks, [str(script)], world.env, world.preload)

    def set_up(self) -> None:
        """Waits for all ranks and calls the world's setup."""
        while len(self._connections) < self.world.num_ranks:
            if self._job.has_ended():
                raise self._failed("the world ended before its ranks had started")
            if time.monotonic() > self._begin + _START_SECONDS:
                raise self._failed(f"the world did not start within {_START_SECONDS:g} s")
            with contextlib.suppress(TimeoutError):
                connection = Connection(self._listener.accept()[0].detach())
                rank, pid = connection.recv()
                self._connections[connection] = rank
                self._pids[rank] = pid
        if self.world.setup is not None:
            self.ask(
                Task(Call.to(self.world.setup, self.world.args), is_setup=True), _START_SECONDS
            )

    def ask(self, task: Task, timeout: float) -> tuple[Any, ...]:
        """Has every rank do a task; returns the values by rank.

        Raises:
            RanksFailedError: it went wrong; the world is of no use any more.
        """
        payload = pickle.dumps(task)
        replies: dict[int, Reply] = {}
        waiting = dict(self._connections)
        deadline = time.monotonic() + timeout
        try:
            for connection in waiting:
                connection.send_bytes(payload)
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for connection in (each for each in waiting.copy() if each in ready):
                    reply = pickle.loads(connection.recv_bytes())
                    replies[waiting.pop(connection)] = reply
                    if reply.record is not None:
                        deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
        except (EOFError, OSError) as error:
            raise self._a_rank_has_ended(replies) from error
        if any(reply.record for reply in replies.values()):
            raise self._failed("", replies)
        if waiting:
            raise self._too_late(timeout, sorted(waiting.values()))
        return tuple(pickle.loads(replies[rank].value) for rank in sorted(replies))

    def dismiss(self) -> None:
        """Tells the ranks that there is no more to do; they end like any script."""
        if not self._is_dismissed:
            self._is_dismissed = True
            with contextlib.suppress(OSError):
                for connection in self._connections:
                    connection.send_bytes(pickle.dumps(None))

    def end(self) -> str:
        """Waits for the end of ranks that were dismissed; returns what went wrong with it."""
        in_time = self._job.has_ended(_END_SECONDS)
        trouble = ""
        if not in_time:
            self._print_stacks(list(self._pids))
            trouble = f"a world of {self.world} did not end within {_END_SECONDS:g} s"
        elif self._job.exit_code:
            line = self._job.verdict().line
            trouble = f"a world of {self.world} ended with code {self._job.exit_code}: {line}"
        words = f"{trouble}\n{self._job.last_lines()}" if trouble else ""
        self.kill()
        return words

    def kill(self) -> None:
        """Ends every process at once."""
        self._job.close()
        for connection in self._connections:
            connection.close()
        self._listener.close()
        self._folder.cleanup()

    def _a_rank_has_ended(self, replies: Mapping[int, Reply]) -> RanksFailedError:
        """Returns the failure of a body that ended a process; its launcher ends the others."""
        self._job.has_ended(_END_SECONDS)
        self._job.end()
        return self._failed(f"exit code {self._job.exit_code}: ", replies)

    def _too_late(self, timeout: float, ranks: list[int]) -> RanksFailedError:
        self._print_stacks(ranks)
        return self._failed(f"no end within {timeout:g} s on ranks {ranks}")

    def _print_stacks(self, ranks: list[int]) -> None:
        """Has ranks say where they are, one after the other, for a failure's last lines."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], rank_loop.STACKS_SIGNAL)
            time.sleep(_STACKS_SECONDS)

    def _failed(self, message: str, replies: Mapping[int, Reply] | None = None) -> RanksFailedError:
        """Returns the error that says which rank failed first and why."""
        replies = replies or {}
        failures = [reply.record for reply in replies.values() if reply.record is not None]
        details = self._job.last_lines()
        if failures or self._job.exit_code:
            verdict = self._job.verdict(failures)
            message += verdict.line
            first = replies.get(-1 if verdict.traceback_rank is None else verdict.traceback_rank)
            details = first.words if first is not None and first.words else details
        seconds = time.monotonic() - self._begin
        printed = self._job.stdout(), self._job.stderr()
        outcome = Outcome((), self._job.exit_code or 1, *printed, seconds)
        return RanksFailedError(f"{message}\n{details}", outcome)
