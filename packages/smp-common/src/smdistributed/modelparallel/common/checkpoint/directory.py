"""Crash-safe checkpoints that all ranks save and resume together; no tensor I/O.

The ranks write their files aside, then one of them commits the checkpoint (see
`checkpoint.store`), and every step ends with an exchange: when one rank fails, all ranks raise the
same error and nothing is committed. A process that dies is noticed by the exchange itself.

All ranks must see one directory: one host, or storage that the hosts share. Only a full
checkpoint, which one rank writes, may lie on that rank's host alone. One job at a time may save in
a directory.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading;
model-parallel-extended-features-pytorch-checkpoint.md.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from smdistributed.modelparallel.common.checkpoint.background import (
    BackgroundSave,
    OwnPart,
    Written,
)
from smdistributed.modelparallel.common.checkpoint.durable_files import (
    FileRecord,
    Writer,
    flush_directory,
    flush_written,
    write_and_flush,
)
from smdistributed.modelparallel.common.checkpoint.store import (
    FULL_FILES,
    MANIFEST,
    Checkpoint,
    CheckpointStore,
    Tag,
    is_plain,
)
from smdistributed.modelparallel.common.errors import CheckpointError


class _Request(NamedTuple):
    """What a rank asks for when it enters a save."""

    tag: str
    is_partial: bool
    is_folder: bool
    keep: int | None
    names: list[str]


class Reply(NamedTuple):
    """What a rank tells the others after its part of a step."""

    rank: int
    host: str
    failure: str | None
    result: Any


#: Copies what a file will hold, and returns what writes the copy.
Taking = Callable[[], Writer]

#: One of the steps in which all ranks write a format that lays its files down by itself. It is
#: given the folder and what the step before has returned, a value a rank; the last one returns the
#: names of the files that its rank has written.
Step = Callable[[Path, Sequence[Any]], Any]


class Rest(NamedTuple):
    """What is left to write of a format that lays its files down by itself, after its steps.

    Attributes:
        write: writes the files of this rank into the folder, without the others; returns their
            names, and what it tells the rank that completes the checkpoint, which JSON must take.
        complete: writes what follows from what all have told, on one rank; returns the names of
            these files.
    """

    write: Callable[[Path], tuple[list[str], Any]]
    complete: Callable[[Path, Sequence[Any]], list[str]] = lambda folder, told: []


class CheckpointDirectory:
    """Checkpoints below one path, saved and resolved by all participating ranks together.

    Args:
        path: the directory; the first save makes it.
        rank: global rank of this process, for messages.
        gather: all-gathers a picklable object over the participating ranks, in one order on all
            of them. An error on one rank is told through it, so no rank waits for one that failed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        gather: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._store = CheckpointStore(path)
        self.path = self._store.path
        self._rank = rank
        self._gather = gather

    def write_partial(
        self,
        tag: str | int,
        files: Mapping[str, Writer],
        *,
        keep: int | None = None,
        steps: Sequence[Step] = (),
    ) -> None:
        """Save a partial checkpoint, to which each rank adds its files; it becomes the newest.

        Collective: all participating ranks. Returns when everything is on disk.

        Args:
            tag: the same on all ranks; an earlier partial checkpoint of this tag is replaced.
            files: the files of this rank, which may be none; each function writes one.
            keep: remove the oldest partial checkpoints that exceed this number, after the commit.
            steps: write further files, after these.

        Raises:
            TypeError, ValueError: on the ranks whose own arguments break a rule.
            CheckpointError: on all ranks, when any rank failed or the ranks do not fit together.
        """
        self._write(tag, files, steps, is_partial=True, keep=keep)

    def write_full(self, tag: str | int, files: Mapping[str, Writer]) -> None:
        """Save a full checkpoint, whose files one rank gives; it becomes the newest.

        Collective: all participating ranks. Returns when everything is on disk.

        Args:
            tag: the same on all ranks; an earlier full checkpoint of this tag is replaced.
            files: ``model`` (saved as ``<tag>``) and, if there are any, ``optimizer`` and
                ``user_content`` (saved as ``optimizer_<tag>`` and ``user_content_<tag>``); empty
                on all ranks but one.

        Raises:
            TypeError, ValueError: on the ranks whose own arguments break a rule.
            CheckpointError: on all ranks, when any rank failed or the ranks do not fit together.
        """
        self._write(tag, files, is_partial=False, keep=None)

    def write_folder(
        self, tag: str | int, files: Mapping[str, Writer], *, steps: Sequence[Step] = ()
    ) -> None:
        """Save a full checkpoint as a folder of files of many ranks; it becomes the newest.

        Collective: all participating ranks. Returns when everything is on disk.

        Args:
            tag: the same on all ranks, and the name of the folder; an earlier one is replaced.
            files: as in ``write_partial``.
            steps: as there.

        Raises:
            TypeError, ValueError: on the ranks whose own arguments break a rule.
            CheckpointError: on all ranks, when any rank failed or the ranks do not fit together.
        """
        self._write(tag, files, steps, is_partial=False, is_folder=True, keep=None)

    def newest(self) -> Tag | None:
        """The checkpoint saved last; None before the first. Local.

        Raises:
            CheckpointError: the file ``newest`` is damaged.
        """
        return self._store.newest()

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints found, oldest first; damaged ones are left out. Local."""
        return self._store.checkpoints()

    def resolve(self, tag: str | int | None = None, *, partial: bool = True) -> Checkpoint:
        """Find a checkpoint by its tag, or the newest one of its kind.

        Collective: all participating ranks.

        Raises:
            CheckpointError: on all ranks, when it is missing or damaged on any; lists the tags
                found. Or the ranks found different ones.
        """
        found: list[Checkpoint] = []

        def find() -> tuple[str, int]:
            found.append(self._store.find(tag, partial=partial))
            return str(found[0].tag), found[0].sequence

        which = "the newest checkpoint" if tag is None else f"checkpoint {str(tag)!r}"
        replies = self.everywhere(f"Finding {which} in {self.path}", find)
        by_result = {reply.result: reply for reply in reversed(replies)}
        if len(by_result) > 1:
            listed = ", ".join(
                f"'{name}' (save {sequence}) on rank {reply.rank} on host {reply.host}"
                for (name, sequence), reply in by_result.items()
            )
            raise CheckpointError(
                f"All ranks must resume from one checkpoint, found {listed}: put {self.path} on "
                "storage that all hosts share, and give the same tag on all ranks."
            )
        return found[0]

    def everywhere(
        self,
        doing: str,
        action: Callable[[], object],
        unchanged: tuple[type[Exception], ...] = (),
    ) -> list[Reply]:
        """Run a step on all ranks and share the results; a failure of any is raised on all.

        It is also the barrier between the steps. Collective: all participating ranks.

        Args:
            doing: names the step in the message.
            action: what each rank does; its result must be picklable.
            unchanged: errors that the failing rank itself raises as they are.

        Raises:
            CheckpointError: the step failed on some rank.
        """
        failure: Exception | None = None
        result: object = None
        try:
            result = action()
        except Exception as error:
            failure = error
        text = None if failure is None else _describe(failure)
        replies = list(self._gather(Reply(self._rank, socket.gethostname(), text, result)))
        if failure is not None and isinstance(failure, unchanged):
            raise failure
        failed = [reply for reply in replies if reply.failure is not None]
        if failed:
            causes = "; ".join(f"rank {r.rank} on host {r.host}: {r.failure}" for r in failed[:4])
            more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
            raise CheckpointError(f"{doing} failed. {causes}{more}") from failure
        return replies

    def write_behind(
        self,
        tag: str | int,
        files: Mapping[str, Taking],
        *,
        partial: bool,
        is_folder: bool = False,
        keep: int | None = None,
        steps: Sequence[Step] = (),
        rest: Rest | None = None,
        timeout_seconds: float,
    ) -> BackgroundSave:
        """Save as the other methods do, but write while the job goes on.

        Collective: all participating ranks. Returns when everything has been copied, and the steps
        are taken; each rank then writes its own, and the first of them commits the checkpoint when
        all have. One such save at a time may be under way.

        Args:
            tag: as there.
            files: as there, but each function copies first, and returns what writes the copy.
            partial: the kind of the checkpoint.
            is_folder: whether a full one is a folder of files of many ranks.
            keep: as there.
            steps: taken before the call returns; they write nothing.
            rest: what they leave to write.
            timeout_seconds: how long a rank that has written waits for the others.

        Raises:
            TypeError, ValueError: on the ranks whose own arguments break a rule.
            CheckpointError: on all ranks, when any rank failed or the ranks do not fit together.
        """
        is_folder = is_folder or partial
        target, leader, staging = self._begin(tag, files, partial, is_folder, keep)
        doing = _doing(target.name, self.path)
        leads = self._rank == leader.rank
        writes = is_folder or leads
        taken: dict[str, Writer] = {}

        def take() -> None:
            if writes:
                _check_shared(staging, leader.host)
                taken.update((name, taking()) for name, taking in files.items())

        with self._removed_if_failed(staging, leads):
            replies = self.everywhere(doing, take)
            self._take(steps, doing, staging)
        ranks = [reply.rank for reply in replies] if is_folder else [leader.rank]
        written = Written(staging, self._rank, ranks)

        def write_own() -> OwnPart:
            records = _write_files(staging, taken)
            names, told = rest.write(staging) if rest else ([], None)
            return OwnPart({**records, **_flushed(staging, names)}, told)

        def complete() -> None:
            parts = written.collect(timeout_seconds)
            records = {name: each for part in parts for name, each in part.records.items()}
            if rest:
                names = rest.complete(staging, [part.told for part in parts])
                records |= _flushed(staging, names)
            self._store.commit(target, staging, records, keep)

        def write() -> None:
            if not writes:
                return
            try:
                written.write(write_own)
                if leads:
                    complete()
            except BaseException:
                written.give_up()
                raise
            finally:
                taken.clear()

        return BackgroundSave(doing, write, self.everywhere)

    def _write(
        self,
        tag: str | int,
        files: Mapping[str, Writer],
        steps: Sequence[Step] = (),
        *,
        is_partial: bool,
        is_folder: bool = False,
        keep: int | None,
    ) -> None:
        is_folder = is_folder or is_partial
        target, leader, staging = self._begin(tag, files, is_partial, is_folder, keep)
        doing = _doing(target.name, self.path)
        leads = self._rank == leader.rank

        def write() -> dict[str, FileRecord]:
            if not (is_folder or leads):
                return {}
            _check_shared(staging, leader.host)
            return _write_files(staging, files)

        with self._removed_if_failed(staging, leads):
            written = self.everywhere(doing, write)
            if steps:
                names = self._take(steps, doing, staging)
                written += self.everywhere(doing, lambda: _flushed(staging, names))
            records = {name: record for r in written for name, record in r.result.items()}
            self.everywhere(
                doing, lambda: self._store.commit(target, staging, records, keep) if leads else None
            )

    def _take(self, steps: Sequence[Step], doing: str, staging: Path) -> Any:
        """Takes the steps, each when all ranks have taken the one before; returns its own result.

        That is the one of the last step.
        """
        replies: list[Reply] = []
        for step in steps:
            before = [reply.result for reply in replies]
            replies = self.everywhere(doing, functools.partial(step, staging, before))
        return next((reply.result for reply in replies if reply.rank == self._rank), None)

    def _begin(
        self,
        tag: str | int,
        files: Collection[str],
        is_partial: bool,
        is_folder: bool,
        keep: int | None,
    ) -> tuple[Tag, Reply, Path]:
        """Checks what is asked for; returns it, who commits it, and where files are written."""
        doing = _doing(str(tag), self.path)
        requests = self.everywhere(
            doing,
            lambda: _check_request(tag, files, is_partial, is_folder, keep),
            unchanged=(TypeError, ValueError),
        )
        leader = _agree(requests)
        leads = self._rank == leader.rank
        target = Tag(leader.result.tag, is_partial)
        replies = self.everywhere(
            doing, lambda: self._store.prepare(target, is_folder=is_folder) if leads else None
        )
        return target, leader, self.path / next(r.result for r in replies if r.rank == leader.rank)

    @contextlib.contextmanager
    def _removed_if_failed(self, staging: Path, leads: bool) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if leads:
                shutil.rmtree(staging, ignore_errors=True)
            raise


def _check_shared(staging: Path, leader_host: str) -> None:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging.parent} must be one directory for all ranks, but what was just made there "
            f"on host {leader_host} is not visible on host {socket.gethostname()}: use a path "
            "on storage that all hosts share."
        )


def _write_files(staging: Path, files: Mapping[str, Writer]) -> dict[str, FileRecord]:
    records = {name: write_and_flush(staging / name, files[name]) for name in files}
    flush_directory(staging)
    return records


def _flushed(staging: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Flushes files that a format has laid down by itself."""
    records = {name: flush_written(staging / name) for name in names}
    flush_directory(staging)
    return records


def _check_request(
    tag: object, files: Collection[str], is_partial: bool, is_folder: bool, keep: object
) -> _Request:
    if not isinstance(tag, str | int):
        raise TypeError(f"A checkpoint tag must be a string or a step number, got {tag!r}.")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(
            f"num_kept_partial_checkpoints must be at least 1, or None to keep all, got {keep!r}."
        )
    for name in files:
        if is_folder and not is_plain(name):
            raise ValueError(
                f"A checkpoint's file must have a plain name other than {MANIFEST!r}, got {name!r}."
            )
    if not is_folder and files and not {"model"} <= set(files) <= set(FULL_FILES):
        raise ValueError(
            "A full checkpoint has a file 'model' and may have 'optimizer' and 'user_content', "
            f"got {sorted(files)}."
        )
    return _Request(Tag(str(tag), is_partial).name, is_partial, is_folder, keep, list(files))


def _agree(replies: Sequence[Reply]) -> Reply:
    """Check what the ranks ask for together; returns the reply of the rank that commits.

    That is the lowest rank, and for a full checkpoint of single files the one that writes it: its
    host may be the only one that sees the directory.
    """
    first = min(replies, key=lambda reply: reply.rank)
    for reply in replies:
        for field in ("tag", "is_partial", "is_folder", "keep"):
            ours, theirs = getattr(first.result, field), getattr(reply.result, field)
            if ours != theirs:
                raise CheckpointError(
                    f"All ranks must save the same checkpoint: {field} is {ours!r} on rank "
                    f"{first.rank} and {theirs!r} on rank {reply.rank}."
                )
    owners: dict[str, int] = {}
    for reply in replies:
        for name in reply.result.names:
            if name in owners:
                raise CheckpointError(
                    f"A file of a checkpoint must come from one rank: {name!r} comes from ranks "
                    f"{owners[name]} and {reply.rank}."
                )
            owners[name] = reply.rank
    # Where a folder is no partial checkpoint, steps may write all of it.
    if not owners and (first.result.is_partial or not first.result.is_folder):
        raise CheckpointError("A checkpoint must have at least one file, but no rank gave one.")
    if first.result.is_folder:
        return first
    return next(reply for reply in replies if reply.rank == owners["model"])


def _doing(name: str, path: Path) -> str:
    return f"Saving checkpoint {name!r} in {path}"


def made_now(writer: Writer) -> Taking:
    """Returns the taking of a file whose content is small: what is copied is all of it."""

    def take() -> Writer:
        stream = io.BytesIO()
        writer(stream)
        return lambda target: _write_bytes(target, stream.getbuffer())

    return take


def _write_bytes(stream: BinaryIO, data: memoryview) -> None:
    stream.write(data)


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
