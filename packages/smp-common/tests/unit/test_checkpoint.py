"""The store of checkpoints. Long, since it is one list of tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from checkpoint_helpers import World, alone, content, disk_full, names, of_rank, read, save

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory
from smdistributed.modelparallel.common.checkpoint.store import CheckpointStore, Tag
from smdistributed.modelparallel.common.errors import CheckpointError

DRIVER = Path(__file__).with_name("checkpoint_driver.py")


# ------------------------------------------------------------------- layout


def test_partial_checkpoint_has_the_documented_names(tmp_path: Path) -> None:
    save(tmp_path / "made" / "here", 10)

    path = tmp_path / "made" / "here"
    assert names(path) == {"10_partial", "newest"}
    assert names(path / "10_partial") == {"model_0_0.pt", "manifest.json"}
    assert (path / "newest").read_text() == "10 partial\n"
    assert alone(path).newest() == Tag("10", is_partial=True)
    assert read(path) == read(path, 10) == read(path, "10") == {"model_0_0.pt": "text"}


def test_full_checkpoint_has_the_documented_names(tmp_path: Path) -> None:
    files = {"model": content("weights"), "user_content": content("epoch 3")}
    alone(tmp_path).write_full("final.pt", files)

    assert {name for name in names(tmp_path) if name[0] != "."} == {
        "final.pt",
        "user_content_final.pt",
        "newest",
    }
    assert (tmp_path / "final.pt").read_text() == "weights"
    assert (tmp_path / "newest").read_text() == "final.pt full\n"
    assert read(tmp_path, partial=False) == {"model": "weights", "user_content": "epoch 3"}


def test_the_newest_of_the_kind_asked_for_is_found(tmp_path: Path) -> None:
    save(tmp_path, 20, "first")
    save(tmp_path, 10, "second")
    alone(tmp_path).write_full("final", {"model": content("third")})

    assert read(tmp_path) == {"model_0_0.pt": "second"}
    assert read(tmp_path, partial=False) == {"model": "third"}


def test_one_tag_may_be_partial_and_full(tmp_path: Path) -> None:
    save(tmp_path, 1, "parts")
    alone(tmp_path).write_full(1, {"model": content("whole")})

    assert read(tmp_path, 1) == {"model_0_0.pt": "parts"}
    assert read(tmp_path, 1, partial=False) == {"model": "whole"}


def test_a_checkpoint_of_the_same_tag_is_replaced_whole(tmp_path: Path) -> None:
    alone(tmp_path).write_partial(1, {"a": content("old"), "b": content("old")})
    alone(tmp_path).write_partial(1, {"a": content("new")})
    alone(tmp_path).write_full(1, {"model": content("old"), "user_content": content("old")})
    alone(tmp_path).write_full(1, {"model": content("new")})

    assert read(tmp_path, 1) == {"a": "new"}
    assert read(tmp_path, 1, partial=False) == {"model": "new"}
    assert names(tmp_path) == {"1", "1_partial", ".manifest_1.json", "newest"}


def test_full_checkpoint_of_another_program_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "fullmodel.pt").write_text("weights")

    assert read(tmp_path, "fullmodel.pt", partial=False) == {"model": "weights"}


def test_files_may_be_read_by_others(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(umask)
    assert (tmp_path / "1_partial").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "1_partial/model_0_0.pt").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "newest").stat().st_mode & 0o777 == 0o644


# ------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "tag",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "a\nb",
        "newest",
        "user_content_1",
        "optimizer_1",
        "1_partial",
        " ",
    ],
)
def test_tags_that_the_layout_cannot_hold_are_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError, match="A checkpoint tag must"):
        save(tmp_path, tag)
    assert names(tmp_path) == set()


def test_a_tag_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got None"):
        save(tmp_path, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_fewer_than_one_kept_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match=f"num_kept_partial_checkpoints.*got {keep}"):
        save(tmp_path, 1, keep=keep)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("name", ["", "..", "manifest.json", "a/b", "/a"])
def test_file_names_that_are_no_plain_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        alone(tmp_path).write_partial(1, {name: content("x")})


@pytest.mark.parametrize("given", [["user_content"], ["optimizer"], ["model", "scheduler"]])
def test_other_files_of_a_full_checkpoint_are_refused(tmp_path: Path, given: list[str]) -> None:
    with pytest.raises(ValueError, match="A full checkpoint has a file 'model'"):
        alone(tmp_path).write_full("a", dict.fromkeys(given, content("x")))


def test_a_checkpoint_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least one file"):
        alone(tmp_path).write_partial(1, {})


def test_a_missing_tag_lists_the_tags_found(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 10)
    alone(tmp_path).write_full("final", {"model": content("x")})

    expected = "no partial checkpoint '11' in .*tags found: '9 partial', '10 partial', 'final full'"
    with pytest.raises(CheckpointError, match=expected):
        alone(tmp_path).resolve(11)
    with pytest.raises(CheckpointError, match="no full checkpoint '9'"):
        alone(tmp_path).resolve(9, partial=False)


@pytest.mark.parametrize("folder", ["", "missing"])
def test_an_empty_directory_has_no_newest(tmp_path: Path, folder: str) -> None:
    assert alone(tmp_path / folder).newest() is None
    with pytest.raises(CheckpointError, match=r"no newest partial one.*tags found: none"):
        alone(tmp_path / folder).resolve()


def test_a_removed_newest_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "2_partial").rename(tmp_path / "elsewhere")

    with pytest.raises(CheckpointError, match=r"'2'.*tags found: '1 partial'"):
        alone(tmp_path).resolve()


@pytest.mark.parametrize("text", ["", "\n", "10", "10 whole\n", "../10 partial\n", "partial\n"])
def test_a_damaged_newest_is_an_error(tmp_path: Path, text: str) -> None:
    save(tmp_path, 10)
    (tmp_path / "newest").write_text(text)

    with pytest.raises(CheckpointError, match=r"newest must be one line '<tag> partial'"):
        alone(tmp_path).newest()
    assert read(tmp_path, 10)


@pytest.mark.parametrize("is_partial", [True, False])
def test_what_stands_in_the_way_is_found_before_the_commit(
    tmp_path: Path, is_partial: bool
) -> None:
    save(tmp_path, 0)
    before = names(tmp_path)
    if is_partial:
        (tmp_path / "1_partial").touch()
        with pytest.raises(CheckpointError, match=r"A file is in the way: remove .*1_partial"):
            save(tmp_path, 1)
    else:
        (tmp_path / "user_content_1").mkdir()
        with pytest.raises(CheckpointError, match=r"A folder is in the way.*user_content_1"):
            alone(tmp_path).write_full(1, {"model": content("x")})
    assert len(names(tmp_path)) == len(before) + 1
    save(tmp_path, 2)


# ----------------------------------------------------------------- manifest


@pytest.mark.parametrize("is_partial", [True, False])
def test_changed_files_are_found(tmp_path: Path, is_partial: bool) -> None:
    if is_partial:
        alone(tmp_path).write_partial(1, {"model": content("0123456789")})
        path = tmp_path / "1_partial" / "model"
    else:
        alone(tmp_path).write_full(1, {"model": content("0123456789")})
        path = tmp_path / "1"
    checkpoint = alone(tmp_path).resolve(1, partial=is_partial)

    path.write_text("01234")
    with pytest.raises(CheckpointError, match=f"{path} .*expected 10 bytes, found 5"):
        checkpoint.open("model")
    path.write_text("012345678X")
    with pytest.raises(CheckpointError, match=f"{path} .*checksum"):
        checkpoint.verify()
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} of 10 bytes is missing"):
        checkpoint.open("model")
    with pytest.raises(CheckpointError, match=r"no file 'other'; it has \['model'\]"):
        checkpoint.open("other")


def test_the_checksum_is_of_the_final_content(tmp_path: Path) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(b"....body")
        stream.seek(0)
        stream.write(b"head")

    alone(tmp_path).write_partial(1, {"a": write})
    assert read(tmp_path, 1) == {"a": "headbody"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2}'])
def test_a_damaged_manifest_is_an_error_and_blocks_no_save(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "1_partial/manifest.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"manifest .*1_partial/manifest.json is damaged"):
        alone(tmp_path).resolve(1)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == {"1_partial", "3_partial", "newest"}


def test_a_partial_checkpoint_without_manifest_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "1_partial").mkdir()
    with pytest.raises(CheckpointError, match="incomplete copy"):
        alone(tmp_path).resolve(1)


# ---------------------------------------------------------------- retention


def test_retention_removes_the_oldest_saves(tmp_path: Path) -> None:
    for tag in (30, 20, 100):
        save(tmp_path, tag, keep=5)
    alone(tmp_path).write_full("final", {"model": content("x")})
    save(tmp_path, 4, keep=2)

    assert {name for name in names(tmp_path) if name.endswith("_partial")} == {
        "100_partial",
        "4_partial",
    }
    assert (tmp_path / "final").exists()


def test_saving_a_tag_again_makes_it_the_youngest(tmp_path: Path) -> None:
    for tag in (1, 2, 1):
        save(tmp_path, tag)
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == {"1_partial", "3_partial", "newest"}


def test_none_keeps_all(tmp_path: Path) -> None:
    for tag in range(4):
        save(tmp_path, tag)
    assert len(names(tmp_path)) == 5


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="No space left"):
        alone(tmp_path).write_partial(2, {"a": disk_full}, keep=1)
    assert names(tmp_path) == {"1_partial", "newest"}
    assert read(tmp_path) == {"model_0_0.pt": "text"}


def test_a_failure_after_the_commit_says_that_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(target).name == "newest":
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match=r"complete.*recording it in 'newest' failed"):
        save(tmp_path, 2, "second", keep=1)
    assert names(tmp_path) == {"1_partial", "2_partial", "newest"}
    assert read(tmp_path) == {"model_0_0.pt": "text"}
    assert read(tmp_path, 2) == {"model_0_0.pt": "second"}


# -------------------------------------------------------- order of operations


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The flushes and renames below tmp_path from now on, in their order."""
    events: list[tuple[str, str]] = []
    fsync = os.fsync

    def shorten(path: Any) -> str:
        short = str(Path(path).relative_to(tmp_path))
        if short.startswith(".staging-"):
            return "/".join(["staging", *Path(short).parts[1:]])
        return "temporary" if short.endswith(".tmp") else short

    def record_fsync(descriptor: int) -> None:
        events.append(("fsync", shorten(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(real: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def rename(source: Any, target: Any) -> None:
            events.append(("rename", f"{shorten(source)} -> {shorten(target)}"))
            real(source, target)

        return rename

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename(os.replace))
    monkeypatch.setattr(os, "rename", record_rename(os.rename))
    return events


def test_nothing_gets_its_name_before_it_is_on_disk(
    tmp_path: Path, operations: list[tuple[str, str]]
) -> None:
    save(tmp_path, 1)
    operations.clear()
    save(tmp_path, 2, keep=1)

    assert operations == [
        ("fsync", "staging/model_0_0.pt"),
        ("fsync", "staging"),
        ("fsync", "staging/manifest.json"),
        ("fsync", "staging"),
        ("rename", "staging -> .committed-2_partial"),
        ("fsync", "."),
        ("rename", ".committed-2_partial -> 2_partial"),
        ("fsync", "."),
        ("fsync", "temporary"),
        ("rename", "temporary -> newest"),
        ("fsync", "."),
        ("rename", "1_partial -> .removed-1_partial"),
    ]


def test_a_full_checkpoint_keeps_its_committed_manifest_until_its_files_are_on_disk(
    tmp_path: Path, operations: list[tuple[str, str]]
) -> None:
    alone(tmp_path).write_full("a", {"model": content("x")})

    assert operations == [
        ("fsync", "staging/model"),
        ("fsync", "staging"),
        ("fsync", "staging/manifest.json"),
        ("fsync", "staging"),
        ("rename", "staging -> .committed-a"),
        ("fsync", "."),
        ("rename", ".committed-a/model -> a"),
        ("fsync", "."),
        ("rename", ".committed-a/manifest.json -> .manifest_a.json"),
        ("fsync", "."),
        ("fsync", "temporary"),
        ("rename", "temporary -> newest"),
        ("fsync", "."),
    ]


def test_a_filesystem_that_cannot_flush_folders_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    save(tmp_path, 1)
    assert read(tmp_path)


# ------------------------------------------------------------------- crashes


def test_leftovers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".staging-2_partial-abcd", ".removed-0_partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_0_0.pt").write_text("half")
    (tmp_path / ".newest.host-1-abcd.tmp").write_text("ha")
    (tmp_path / "notes.txt").write_text("of the user")

    assert [str(c.tag) for c in CheckpointStore(tmp_path).checkpoints()] == [
        "notes.txt full",
        "1 partial",
    ]
    save(tmp_path, 3)
    assert names(tmp_path) == {"1_partial", "3_partial", "newest", "notes.txt"}


def test_links_among_the_leftovers_do_not_block_a_save(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    save(target, 1)
    for entry in (".removed-1_partial", ".staging-x", ".committed-2_partial", ".newest.x"):
        (tmp_path / entry).symlink_to(target)
    (tmp_path / ".removed-gone").symlink_to("nowhere")
    (tmp_path / ".committed-file").write_text("")
    (tmp_path / ".committed-").mkdir()
    (tmp_path / "1_partial").symlink_to("nowhere")
    save(tmp_path, 1)
    save(tmp_path, 1, "again")
    assert names(tmp_path) == {"1_partial", ".committed-", "newest", "elsewhere"}
    assert read(tmp_path, 1) == {"model_0_0.pt": "again"}
    assert read(target, 1) == {"model_0_0.pt": "text"}


def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    path = tmp_path / "a/1_partial/model_0_0.pt"
    path.rename(tmp_path / "same")
    path.symlink_to(tmp_path / "same")
    with pytest.raises(CheckpointError, match="is a link, which may lead anywhere"):
        read(tmp_path / "a", 1)
    # A checkpoint in the place of one that is being installed is none.
    save(tmp_path / "b", 1)
    (tmp_path / "b/.committed-2_partial").symlink_to(tmp_path / "b/1_partial")
    with pytest.raises(CheckpointError, match="no partial checkpoint '2'"):
        read(tmp_path / "b", 2)


@pytest.mark.parametrize("name", ["../same", "/etc/passwd", "..", "manifest.json"])
def test_a_manifest_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "1_partial/model_0_0.pt").rename(tmp_path / "same")
    manifest = tmp_path / "1_partial/manifest.json"
    manifest.write_text(manifest.read_text().replace("model_0_0.pt", name))
    with pytest.raises(CheckpointError, match="is no name of a file beside it"):
        read(tmp_path, 1)


def run_driver(*args: object) -> None:
    command = [sys.executable, str(DRIVER), *map(str, args)]
    subprocess.run(command, check=True, timeout=120)


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        ("first", 20),
        ("next", 20),
        ("same", 20),
        # Written behind, the same operations follow.
        pytest.param("retention", 30, marks=pytest.mark.slow),
        ("behind-retention", 30),
        pytest.param("behind-next", 20, marks=pytest.mark.slow),
        pytest.param("behind-same", 20, marks=pytest.mark.slow),
        pytest.param("full-behind", 20, marks=pytest.mark.slow),
        ("full-next", 20),
        ("full-same", 20),
        ("full-same-without-content", 20),
    ],
)
def test_a_kill_before_any_operation_leaves_a_complete_newest_checkpoint(
    tmp_path: Path, scenario: str, at_least: int
) -> None:
    run_driver("steps", tmp_path, scenario)
    is_partial = not scenario.startswith("full")
    model = "model_0_0.pt" if is_partial else "model"
    old = {model: "model old", "user_content.pt" if is_partial else "user_content": "user old"}
    new = {name: text.replace("old", "new") for name, text in old.items()}
    if scenario == "full-same-without-content":
        del new["user_content"]

    runs = [tmp_path / str(k) for k in range(len(names(tmp_path)))]
    assert len(runs) > at_least
    seen: list[dict[str, str] | None] = []
    for path in runs:
        newest = alone(path).newest()
        if newest is None:
            assert scenario == "first"
            seen.append(None)
        else:
            seen.append(read(path, partial=is_partial))
        # The next save works, finds it all in order, and clears up.
        for checkpoint in CheckpointStore(path).checkpoints():
            checkpoint.verify()
        if is_partial:
            save(path, 3, keep=1)
            assert names(path) == {"3_partial", "newest"}
        else:
            save(path, 3)
            assert not [n for n in names(path) if n.startswith((".committed", ".staging"))]
            if newest is not None:
                assert read(path, newest.name, partial=False) == seen[-1]
    first = seen.index(new)
    assert seen == [None if scenario == "first" else old] * first + [new] * (len(seen) - first)
    assert 0 < first < len(seen) - 1


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["loop", "loop-behind"])
def test_sigkill_at_random_moments_never_loses_the_newest(
    tmp_path: Path, mode: str, kills: int
) -> None:
    generator = random.Random(0)
    last = 0
    for _ in range(kills):
        command = [sys.executable, str(DRIVER), mode, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reported = int(process.stdout.readline())
            time.sleep(generator.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            reported = max([reported, *map(int, process.stdout.read().split("\n")[:-1])])
        newest = alone(tmp_path).newest()
        assert newest is not None
        assert int(newest.name) in (reported, reported + 1)
        assert int(newest.name) > last
        last = int(newest.name)
        assert read(tmp_path)["model_0_0.pt"] == f"model {newest.name * 1000}"
    save(tmp_path, "end", keep=1)
    assert names(tmp_path) == {"end_partial", "newest"}


# --------------------------------------------------------------- several ranks


def test_all_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    world = World(3)

    def body(directory: CheckpointDirectory, rank: int) -> list[str]:
        directory.write_partial(1, of_rank(rank) if rank else {})
        # On return everything is complete on every rank.
        assert directory.newest() == Tag("1", is_partial=True)
        checkpoint = directory.resolve()
        checkpoint.verify()
        return sorted(checkpoint.paths)

    assert world.run(body, tmp_path) == [["model_1_0.pt", "model_2_0.pt"]] * 3


def test_steps_write_a_folder_that_is_whole_or_not_there(tmp_path: Path) -> None:
    """Each step sees what all ranks have made of the one before."""
    failing: list[int] = []

    def body(directory: CheckpointDirectory, rank: int) -> Any:
        def write(folder: Path, before: Any) -> list[str]:
            if rank in failing:
                raise OSError(28, "No space left on device")
            assert before == [0, 10, 20]
            (folder / f"of_{rank}").write_text(str(rank))
            return [f"of_{rank}"]

        files = {"config.json": content("{}")} if rank == 0 else {}
        directory.write_folder("whole", files, steps=[lambda *_: rank * 10, write])
        found = directory.resolve(partial=False)
        found.verify()
        return sorted(found.paths)

    assert World(3).run(body, tmp_path) == [["config.json", "of_0", "of_1", "of_2"]] * 3

    def write_alone(folder: Path, before: Any) -> list[str]:
        (folder / "alone").touch()
        return ["alone"]

    alone(tmp_path / "bare").write_folder("whole", {}, steps=[write_alone])
    assert "alone" in names(tmp_path / "bare" / "whole")
    failing.append(1)
    assert all("No space left" in str(error) for error in World(3).run(body, tmp_path))
    assert names(tmp_path) == {"bare", "newest", "whole"}
    (tmp_path / "whole" / "of_2").write_text("changed")
    with pytest.raises(CheckpointError, match="not the file that was saved"):
        alone(tmp_path).resolve("whole", partial=False).verify()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors").touch()
    theirs = alone(tmp_path).resolve("theirs", partial=False)
    assert (list(theirs.paths), theirs.manifest) == (["model.safetensors"], None)
    assert [each.tag.name for each in alone(tmp_path).checkpoints()] == ["whole"]
    with pytest.raises(CheckpointError, match="A folder is in the way"):
        alone(tmp_path).write_full("whole", {"model": content("x")})


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path, failing: int) -> None:
    world = World(3)
    world.run(lambda d, rank: d.write_partial(1, of_rank(rank)), tmp_path)

    def body(directory: CheckpointDirectory, rank: int) -> None:
        files = {"a": disk_full} if rank == failing else of_rank(rank)
        directory.write_partial(2, files, keep=1)

    errors = world.run(body, tmp_path)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"rank {failing} on host" in str(error)
        assert "No space left on device" in str(error)
    assert isinstance(errors[failing].__cause__, OSError)
    assert names(tmp_path) == {"1_partial", "newest"}


def test_a_failed_commit_is_raised_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Any, target: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    errors = World(2).run(lambda d, rank: d.write_partial(1, of_rank(rank)), tmp_path)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert all("rank 0 on host" in str(error) for error in errors)
    assert names(tmp_path) == set()


def test_bad_arguments_of_one_rank_are_told_to_all(tmp_path: Path) -> None:
    def body(directory: CheckpointDirectory, rank: int) -> None:
        directory.write_partial(1, of_rank(rank), keep=0 if rank == 1 else 3)

    errors = World(2).run(body, tmp_path)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], CheckpointError)
    assert "rank 1" in str(errors[0])
    assert "got 0" in str(errors[0])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            lambda d, rank: d.write_partial(10 + rank, of_rank(rank)),
            "tag is '10' on rank 0 and '11' on rank 1",
        ),
        (
            lambda d, rank: d.write_partial(1, of_rank(rank), keep=1 + rank),
            "keep is 1 on rank 0 and 2 on rank 1",
        ),
        (
            lambda d, rank: d.write_partial(1, {}) if rank else d.write_full(1, {}),
            "is_partial is False on rank 0 and True on rank 1",
        ),
        (
            lambda d, rank: d.write_partial(1, {"a": content("x")}),
            "'a' comes from ranks 0 and 1",
        ),
        (
            lambda d, rank: d.write_full(1, {"model": content("x")}),
            "'model' comes from ranks 0 and 1",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_all_raise(
    tmp_path: Path, body: Callable[[CheckpointDirectory, int], None], expected: str
) -> None:
    for error in World(2).run(body, tmp_path):
        assert isinstance(error, CheckpointError)
        assert expected in str(error)
    assert names(tmp_path) == set()


def test_hosts_without_shared_storage_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "host0", tmp_path / "host1"
    second.mkdir()
    errors = World(2).run(lambda d, rank: d.write_partial(1, of_rank(rank)), first, second)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "rank 1 on host" in str(error)
        assert "storage that all hosts share" in str(error)
    assert names(first) == names(second) == set()


def test_a_full_checkpoint_needs_only_the_writers_host(tmp_path: Path) -> None:
    paths = tmp_path / "host0", tmp_path / "host1"

    def body(directory: CheckpointDirectory, rank: int) -> None:
        directory.write_full("final", {"model": content("x")} if rank == 1 else {})

    assert World(2).run(body, *paths) == [None, None]
    assert read(paths[1], partial=False) == {"model": "x"}
    assert not paths[0].exists()


def test_a_rank_that_finds_no_checkpoint_stops_all(tmp_path: Path) -> None:
    save(tmp_path / "host0", 1)
    errors = World(2).run(lambda d, rank: d.resolve(1), tmp_path / "host0", tmp_path / "host1")
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "rank 1 on host" in str(error)
        assert "tags found: none" in str(error)


def test_ranks_that_find_different_checkpoints_all_raise(tmp_path: Path) -> None:
    save(tmp_path / "host0", 1)
    save(tmp_path / "host1", 2)
    errors = World(2).run(lambda d, rank: d.resolve(), tmp_path / "host0", tmp_path / "host1")
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "'1 partial' (save 1) on rank 0" in str(error)
        assert "'2 partial' (save 1) on rank 1" in str(error)
