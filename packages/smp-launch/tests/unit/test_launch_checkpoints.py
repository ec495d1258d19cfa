"""A folder of checkpoints, kept in step with an address."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.job import checkpoints
from smdistributed.modelparallel.launch.job.checkpoints import Keeper
from smdistributed.modelparallel.launch.storage.places import Location, locate

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


def look_twice(keeper: Keeper) -> None:
    """Copies what is whole, as a running keeper does after a moment."""
    for _ in range(2):
        keeper._versions.look()
    keeper._copy(only_whole=True)


def test_what_changed_is_copied(tmp_path: Path, kept: Path, keeper: Keeper) -> None:
    write(tmp_path / "here/a/1.pt", "one")
    look_twice(keeper)
    assert files_in(kept) == {"a/1.pt": "one"}
    (kept / "a/1.pt").write_text("seen")
    look_twice(keeper)
    assert files_in(kept) == {"a/1.pt": "seen"}, "what did not change is not copied again"
    write(tmp_path / "here/a/1.pt", "two", OLD_SECONDS + 1)
    look_twice(keeper)
    assert files_in(kept) == {"a/1.pt": "two"}
    keeper.copy()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "here", kept], "no second names are left"


@pytest.mark.parametrize("knows_writers", [True, False])
def test_a_file_that_is_written_waits_and_what_comes_after_it_too(
    tmp_path: Path,
    kept: Path,
    keeper: Keeper,
    knows_writers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    if not knows_writers:  # as on file systems of other hosts
        monkeypatch.setattr(fcntl, "F_SETLEASE", -1)
    write(here / "old.pt", "old")
    with (here / "a.pt").open("w") as stream:
        stream.write("a")
        stream.flush()
        (here / "latest").write_text("a")
        look_twice(keeper)
        assert files_in(kept) == {"old.pt": "old"}
    look_twice(keeper)
    assert ("latest" in files_in(kept)) is knows_writers, "written a moment ago"
    # At the end nothing is written any more.
    keeper.copy()
    assert files_in(kept) == {"old.pt": "old", "latest": "a", "a.pt": "a"}


def test_each_checkpoint_is_copied_in_its_turn_though_the_script_goes_on(
    tmp_path: Path, kept: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    here = tmp_path / "here"

    def note(source: Path, target: Location) -> None:
        upload(source, target)
        order.append(f"{target.path.removeprefix(str(kept))} {source.read_text()}")

    upload = checkpoints.upload
    monkeypatch.setattr(checkpoints, "upload", note)
    for step in (1, 2, 3):
        write(here / f"{step}/z.pt", f"z{step}", OLD_SECONDS + 10 * step)
        write(here / "new", f"{step}", OLD_SECONDS + 10 * step + 1)
        (here / ".temporary").write_text("being named")
        keeper._versions.look()
        (here / "new").replace(here / "latest")
        (here / ".temporary").replace(here / f"{step}/named.pt")
        os.utime(here / f"{step}/named.pt", (OLD_SECONDS + 10 * step,) * 2)
        keeper._versions.look()
        if step > 1:
            (here / f"{step - 1}/z.pt").unlink()
    look_twice(keeper)
    assert [each for each in order if "named" not in each] == [
        *("/1/z.pt z1", "/latest 1", "/2/z.pt z2", "/latest 2", "/3/z.pt z3", "/latest 3"),
    ]
    assert {f"{step}/named.pt" for step in (1, 2, 3)} < files_in(kept).keys()
    assert ".temporary" not in files_in(kept)


def test_what_changes_while_it_is_copied_is_copied_again(
    tmp_path: Path, kept: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "here/a.pt"

    def change(source: Path, target: Location) -> None:
        upload(source, target)
        if source.read_text() == "one":
            write(place, "two", OLD_SECONDS + 1)
            keeper._versions.look()

    upload = checkpoints.upload
    monkeypatch.setattr(checkpoints, "upload", change)
    write(place, "one")
    look_twice(keeper)
    look_twice(keeper)
    assert files_in(kept) == {"a.pt": "two"}


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
    monkeypatch.setattr(checkpoints, "_AGAIN_SECONDS", 0.01)
    keeper = Keeper(tmp_path / "here", locate(str(kept), tmp_path), said.append)
    write(tmp_path / "here/a.pt", "one")
    with keeper:
        for thread in keeper._threads:
            thread.join()
    assert len(tried) == 3
    assert said == ["here: it is away. It is tried again"]
    with pytest.raises(StorageError):
        keeper.copy()
