"""What each rank of a world does: calls what the world's owner asks for, until there is no more."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

from smdistributed.modelparallel.common import failure
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.launcher import bootstrap
from smdistributed.modelparallel.common.testing.calls import Call

#: Has a rank print the stacks of its threads.
STACKS_SIGNAL = signal.SIGUSR1
#: What a collection takes several milliseconds to look at.
_MANY_OBJECTS = 20_000


@dataclass(frozen=True)
class Task:
    """A call.

    Attributes:
        call: what to do.
        is_setup: whether it makes the world: then what it returns is called before every other.
        settings: arguments of that.
    """

    call: Call
    is_setup: bool = False
    settings: tuple[object, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What came of a task on one rank.

    Attributes:
        value: what it returned, pickled.
        record: who failed and why, or None.
        words: the traceback of the failure.
    """

    value: bytes = b""
    record: failure.FailureRecord | None = None
    words: str = ""


def serve(address: str) -> None:
    """Runs tasks that come from ``address``; on each rank.

    The owner's silence is no end, but the end of its process is: then this one ends at once,
    whatever it is doing.
    """
    rank = bootstrap.rank()
    with failure.guarded(lambda: rank):
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        owner = Client(address, family="AF_UNIX")
        owner.send((rank, os.getpid()))
        tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(owner, tasks), daemon=True).start()
        prepare: Callable[..., object] | None = None
        while (task := tasks.get()) is not None:
            if prepare is not None and not task.is_setup:
                prepare(*task.settings)
            reply, value = _attempt(task, rank)
            if task.is_setup:
                prepare = value
            del value
            # Every rank forgets the models of a task at the same time.
            gc.collect()
            if len(gc.get_objects()) > _MANY_OBJECTS:
                # What is left stays, as a rule: modules, and what TensorFlow keeps of each graph.
                # The collections of later tasks need not look at it.
                gc.freeze()
            owner.send_bytes(pickle.dumps(reply))


def _listen(owner: Connection, tasks: queue.SimpleQueue[Task | None]) -> None:
    while True:
        try:
            tasks.put(pickle.loads(owner.recv_bytes()))
        except (EOFError, OSError):
            os._exit(1)


def _attempt(task: Task, rank: int) -> tuple[Reply, Any]:
    try:
        value = task.call()
        # What a setup returns stays here.
        return Reply(pickle.dumps(None if task.is_setup else value)), value
    # Also what pytest raises where a test fails, which is no Exception.
    except BaseException as error:
        blamed = error.missing_ranks if isinstance(error, CommError) else ()
        summary = "".join(traceback.format_exception_only(error)).strip()
        record = failure.FailureRecord(
            rank, socket.gethostname(), 1, " ".join(summary.split()), blamed, time.time()
        )
        return Reply(record=record, words=traceback.format_exc()), None
