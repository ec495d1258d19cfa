"""Saves that are written while the job goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from checkpoint_helpers import World, alone, content, disk_full, names, of_rank, read, save

from smdistributed.modelparallel.common.checkpoint import directory as module
from smdistributed.modelparallel.common.checkpoint.background import BackgroundSave
from smdistributed.modelparallel.common.checkpoint.directory import (
    CheckpointDirectory,
    made_now,
)
from smdistributed.modelparallel.common.errors import CheckpointError


class Gate:
    """Holds the writing of files up, or has it fail."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.fails: set[str] = set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    real = module.write_and_flush

    def write(path: Path, writer: Callable[[BinaryIO], None]) -> Any:
        assert made.is_open.wait(60)
        return real(path, disk_full if path.name in made.fails else writer)

    monkeypatch.setattr(module, "write_and_flush", write)
    yield made
    made.is_open.set()


def begin(directory: CheckpointDirectory, tag: Any, files: Any, **options: Any) -> BackgroundSave:
    takings = {name: made_now(writer) for name, writer in files.items()}
    options = {"partial": True, "timeout_seconds": 60, **options}
    return directory.write_behind(tag, takings, **options)


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path, gate: Gate) -> None:
    gate.is_open.set()
    save(tmp_path, 1)
    gate.is_open.clear()
    text = ["before"]
    files = {"model_0_0.pt": lambda stream: content(text[0])(stream)}
    pending = begin(alone(tmp_path), 2, files)
    text[0] = "after"
    assert not pending.is_written
    assert read(tmp_path) == {"model_0_0.pt": "text"}
    gate.is_open.set()
    pending.wait()
    assert pending.is_written
    assert read(tmp_path) == {"model_0_0.pt": "before"}
    assert names(tmp_path) == {"1_partial", "2_partial", "newest"}
    assert names(tmp_path / "2_partial") == {"model_0_0.pt", "manifest.json"}


def test_the_last_rank_completes_the_checkpoint_without_any_communication(tmp_path: Path) -> None:
    world = World(3)
    pending = world.run(lambda d, rank: begin(d, 1, of_rank(rank)), tmp_path)
    pending[0]._thread.join(60)
    assert len(read(tmp_path)) == 3
    # Waiting is an exchange, the second time nothing.
    assert world.run(lambda d, rank: pending[rank].wait(), tmp_path) == [None] * 3
    for each in pending:
        each.wait()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_of_one_rank_is_raised_on_all_that_wait(
    tmp_path: Path, gate: Gate, failing: int
) -> None:
    world = World(3)
    gate.is_open.set()
    world.run(lambda d, rank: d.write_partial(1, of_rank(rank)), tmp_path)
    gate.fails.add(f"model_{failing}_0.pt")
    pending = world.run(lambda d, rank: begin(d, 2, of_rank(rank), keep=1), tmp_path)
    errors = world.run(lambda d, rank: pending[rank].wait(), tmp_path)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"rank {failing} on host" in str(error)
        assert "No space left on device" in str(error)
    for each in pending:
        each.wait()  # told once
    assert names(tmp_path) == {"1_partial", "newest"}


def test_a_failure_before_the_return_is_raised_on_all(tmp_path: Path) -> None:
    world = World(2)

    def body(directory: CheckpointDirectory, rank: int) -> None:
        begin(directory, 1, {"a": disk_full} if rank else of_rank(rank))

    for error in world.run(body, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "rank 1 on host" in str(error)
    assert names(tmp_path) == set()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, gate: Gate) -> None:
    world = World(2)

    # Rank 1 is held up in its writing; rank 0 has no files.
    def held(directory: CheckpointDirectory, rank: int) -> BackgroundSave:
        return begin(directory, 1, of_rank(rank) if rank else {}, timeout_seconds=0.2)

    pending = world.run(held, tmp_path)
    pending[0]._thread.join(60)
    gate.is_open.set()
    for error in world.run(lambda d, rank: pending[rank].wait(), tmp_path):
        assert "rank 1 has not written its files within 0.2 s" in str(error)
    assert names(tmp_path) == set()


def test_hosts_without_shared_storage_are_refused(tmp_path: Path) -> None:
    world = World(2)
    errors = world.run(lambda d, rank: begin(d, 1, of_rank(rank)), tmp_path / "a", tmp_path / "b")
    for error in errors:
        assert "must be one directory for all ranks" in str(error)


def test_one_rank_writes_a_full_checkpoint(tmp_path: Path) -> None:
    world = World(2)

    def body(directory: CheckpointDirectory, rank: int) -> None:
        files = {} if rank else {"model": content("whole")}
        begin(directory, "full", files, partial=False).wait()

    assert world.run(body, tmp_path / "a", tmp_path / "b") == [None, None]
    assert read(tmp_path / "a", partial=False) == {"model": "whole"}


def test_a_failure_that_nobody_waited_for_is_said_at_the_end(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.is_open.set()
    gate.fails.add("model_0_0.pt")
    pending = begin(alone(tmp_path), 1, of_rank(0))
    pending._thread.join(60)
    pending._tell_at_exit()
    assert "Saving checkpoint '1' in" in (told := capsys.readouterr().err)
    assert "No space left on device" in told
    with pytest.raises(CheckpointError, match="No space left"):
        pending.wait()
