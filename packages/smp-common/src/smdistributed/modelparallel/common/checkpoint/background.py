"""Saves that are written while the job goes on.

A thread of each rank writes files; it takes no part in the communication of the job, whose calls
would mix with it. So ranks tell each other through the folder in which they write: each adds a
record of its files when they are on disk, and one that fails takes the folder away.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smdistributed.modelparallel.common.checkpoint.durable_files import FileRecord, write_file
from smdistributed.modelparallel.common.errors import CheckpointError

_RECORD = ".written-"
_GIVEN_UP = "another rank has failed to write its files."
_POLL_SECONDS = 0.02


class OwnPart(NamedTuple):
    """What a rank has written.

    Attributes:
        records: of its files.
        told: what it tells the rank that completes the checkpoint; JSON must take it.
    """

    records: Mapping[str, FileRecord]
    told: Any = None


class Written:
    """What the ranks have written into one folder.

    Args:
        staging: the folder.
        rank: of this process.
        ranks: those that write.
    """

    def __init__(self, staging: Path, rank: int, ranks: Sequence[int]) -> None:
        self._staging = staging
        self._rank = rank
        self._ranks = ranks

    def write(self, action: Callable[[], OwnPart]) -> None:
        """Writes this rank's files, and says that they are on disk.

        Raises:
            CheckpointError: another rank has failed.
            Exception: that of ``action``.
        """
        try:
            self._share(action())
        except OSError as error:
            if self.is_given_up:
                raise CheckpointError(_GIVEN_UP) from error
            raise

    def _share(self, part: OwnPart) -> None:
        files = {name: record._asdict() for name, record in part.records.items()}
        text = json.dumps({"files": files, "told": part.told}).encode()
        write_file(self._staging / f"{_RECORD}{self._rank}", lambda stream: _write(stream, text))

    def give_up(self) -> None:
        """Says that this rank has failed, and removes what is written."""
        aside = self._staging.with_name(f"{self._staging.name}-given-up")
        # At once: in a folder that empties others might go on writing.
        with contextlib.suppress(OSError):
            os.rename(self._staging, aside)
        shutil.rmtree(aside, ignore_errors=True)

    @property
    def is_given_up(self) -> bool:
        """Whether a rank has failed."""
        return not self._staging.is_dir()

    def collect(self, timeout_seconds: float) -> list[OwnPart]:
        """Waits for all ranks; returns what each has written, in their order.

        Raises:
            CheckpointError: one failed, or did not come.
        """
        deadline = time.monotonic() + timeout_seconds
        while missing := [rank for rank in self._ranks if not self._record_of(rank).exists()]:
            if self.is_given_up:
                raise CheckpointError(_GIVEN_UP)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {missing[0]} has not written its files within {timeout_seconds:g} s."
                )
            time.sleep(_POLL_SECONDS)
        parts = []
        for rank in self._ranks:
            stored = json.loads(self._record_of(rank).read_text(encoding="utf-8"))
            records = {name: FileRecord(**record) for name, record in stored["files"].items()}
            parts.append(OwnPart(records, stored["told"]))
            self._record_of(rank).unlink()
        return parts

    def _record_of(self, rank: int) -> Path:
        return self._staging / f"{_RECORD}{rank}"


class BackgroundSave:
    """A save that is being written.

    Wait for it, or leave that to the next save. A process that ends normally waits for the writing;
    one that is killed leaves the checkpoint before.

    Args:
        doing: names the save in messages.
        write: what is left to do on this rank.
        everywhere: runs a step on all ranks, and raises a failure of any on all; see
            ``CheckpointDirectory.everywhere``.
    """

    def __init__(
        self,
        doing: str,
        write: Callable[[], None],
        everywhere: Callable[[str, Callable[[], object]], Any],
    ) -> None:
        self._doing = doing
        self._everywhere = everywhere
        self._failure: Exception | None = None
        self._is_told = False

        def run() -> None:
            try:
                write()
            except Exception as error:  # raised where it is waited for
                self._failure = error

        # Not a daemon: the interpreter waits for it before it goes down.
        self._thread = threading.Thread(target=run, name="smp-save")
        self._thread.start()
        atexit.register(self._tell_at_exit)

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing to write any more. Local.

        On the rank that commits: whether the checkpoint can be resumed from, or has failed.
        """
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete. Collective: the ranks that save.

        Raises:
            CheckpointError: on all ranks, the first time: some rank failed; nothing was committed.
        """
        if self._is_told:
            return
        self._thread.join()
        self._is_told = True
        atexit.unregister(self._tell_at_exit)
        self._everywhere(self._doing, self._result)

    def _result(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _tell_at_exit(self) -> None:
        if self._failure is not None:
            print(f"{self._doing} failed: {self._failure}", file=sys.stderr, flush=True)


def _write(stream: Any, data: bytes) -> None:
    stream.write(data)
