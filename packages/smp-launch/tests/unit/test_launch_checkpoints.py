"""A folder of checkpoints, kept in step with an address."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.job import checkpoints
from smdistributed.modelparallel.launch.job.checkpoints import Keeper
from smdistributed.modelparallel.launch.storage.places import locate

OLD_SECONDS = 1e9


def write(path: Path, text: str, seconds: float = OLD_SECONDS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (seconds, seconds))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def keeper(tmp_path: Path, kept: Path) -> Keeper:
    found = Keeper(tmp_path / "here", locate(str(kept), tmp_path), print)
    assert found.restore(lambda: None) == 0
    return found


def files_in(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_changed_is_copied(tmp_path: Path, kept: Path, keeper: Keeper) -> None:
    write(tmp_path / "here/a/1.pt", "one")
    keeper.copy(2.0)
    assert files_in(kept) == {"a/1.pt": "one"}
    (kept / "a/1.pt").write_text("seen")
    keeper.copy(2.0)
    assert files_in(kept) == {"a/1.pt": "seen"}, "what did not change is not copied again"
    write(tmp_path / "here/a/1.pt", "two", OLD_SECONDS + 1)
    keeper.copy(2.0)
    assert files_in(kept) == {"a/1.pt": "two"}


def test_files_that_are_written_wait_and_what_speaks_for_them_too(
    tmp_path: Path, kept: Path, keeper: Keeper
) -> None:
    here = tmp_path / "here"
    write(here / "z/part.pt", "old")
    write(here / "latest", "z")
    (here / "a.pt").write_text("being written")
    keeper.copy(2.0)
    assert "latest" not in files_in(kept)
    assert "a.pt" not in files_in(kept)
    # At the end nothing is written any more.
    keeper.copy()
    assert files_in(kept) == {"z/part.pt": "old", "latest": "z", "a.pt": "being written"}


def test_what_speaks_for_others_comes_last(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(checkpoints, "upload", lambda path, target: order.append(path.name))
    for name in ("z.pt", "latest", "manifest.json", "a.pt"):
        write(tmp_path / "here" / name, name)
    keeper.copy()
    assert order == ["a.pt", "z.pt", "latest", "manifest.json"]


def test_another_job_goes_on_from_there(tmp_path: Path, kept: Path, keeper: Keeper) -> None:
    write(tmp_path / "here/a/1.pt", "one")
    keeper.copy()
    later = Keeper(tmp_path / "later", locate(str(kept), tmp_path), print)
    assert later.restore(lambda: None) == 1
    assert files_in(tmp_path / "later") == {"a/1.pt": "one"}
    (kept / "a/1.pt").write_text("seen")
    later.copy()
    assert files_in(kept) == {"a/1.pt": "seen"}, "what was restored is not copied back"


def test_an_address_that_is_away_is_tried_again_and_said_once(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    tried: list[Path] = []

    def away(path: Path, target: object) -> None:
        tried.append(path)
        if len(tried) > 2:
            keeper._end.set()
        raise StorageError("it is away.")

    monkeypatch.setattr(checkpoints, "upload", away)
    monkeypatch.setattr(checkpoints, "_EVERY_SECONDS", 0.01)
    keeper = Keeper(tmp_path / "here", locate(str(kept), tmp_path), said.append)
    write(tmp_path / "here/a.pt", "one")
    with keeper:
        keeper._thread.join()
    assert len(tried) == 3
    assert said == ["here: it is away. It is tried again"]
    with pytest.raises(StorageError):
        keeper.copy()
