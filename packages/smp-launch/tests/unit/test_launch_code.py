"""The archive of a script: what is shipped, and that nothing in it lies elsewhere."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job import code


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name in ("train.py", "lib/__init__.py", "lib/__pycache__/x.pyc", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "common").mkdir()
    (tmp_path / "common/tools.py").touch()
    return folder


@pytest.fixture(params=["with filters", "without filters"])
def _filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.11.4 has no filters of archives."""
    if request.param == "without filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


def shipped(found: code.Code, tmp_path: Path) -> set[str]:
    archive, target = tmp_path / "code.tar.gz", tmp_path / "unpacked"
    found.pack(archive)
    code.unpack(archive, target)
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("_filters")
def test_a_folder_is_shipped_whole(source: Path, tmp_path: Path) -> None:
    found = code.collect("train.py", str(source), [str(tmp_path / "common")])
    assert found.program == "train.py"
    assert shipped(found, tmp_path) == {"train.py", "lib/__init__.py", "common/tools.py"}


def test_a_script_alone_is_shipped_alone(source: Path, tmp_path: Path) -> None:
    found = code.collect(str(source / "train.py"), None, [])
    assert shipped(found, tmp_path) == {"train.py"}


def test_a_script_may_lie_deeper(source: Path) -> None:
    assert code.collect("lib/__init__.py", str(source), []).program == "lib/__init__.py"
    # As an image has it.
    assert code.collect("/opt/ml/code/train.py", str(source), []).program == "train.py"


def test_the_same_files_give_the_same_archive(source: Path, tmp_path: Path) -> None:
    packed = []
    for name in ("one", "two"):
        code.collect("train.py", str(source), []).pack(tmp_path / name)
        (source / "train.py").touch()
        packed.append((tmp_path / name).read_bytes())
    assert packed[0] == packed[1]


@pytest.mark.parametrize(
    ("entry_point", "source_dir", "dependencies", "match"),
    [
        ("other.py", "source", [], r"there is none at /.*/source/other\.py"),
        ("../train.py", "source", [], r"inside source_dir"),
        ("lib", "source", [], r"must be a file"),
        ("train.py", "nowhere", [], r"must be a folder; there is none at /.*/nowhere"),
        ("train.py", "source", ["nothing"], r"a dependency must exist; /.*/nothing"),
        ("train.py", "source", ["common", "common"], r"common is there twice"),
        ("train.py", "source", ["source/lib"], r"lib is there twice"),
    ],
)
def test_what_cannot_be_shipped_is_an_error(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry_point: str,
    source_dir: str,
    dependencies: list[str],
    match: str,
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=match):
        code.collect(entry_point, source_dir, dependencies)


@pytest.mark.usefixtures("_filters")
@pytest.mark.parametrize("kind", ["up", "absolute", "link", "device"])
def test_nothing_in_an_archive_escapes(tmp_path: Path, kind: str) -> None:
    archive, target = tmp_path / "bad.tar.gz", tmp_path / "deep/target"
    with tarfile.open(archive, "w:gz") as packed:
        member = tarfile.TarInfo({"up": "../escaped", "absolute": "/tmp/../escaped"}.get(kind, "a"))
        if kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "../../escaped"
        if kind == "device":
            member.type = tarfile.CHRTYPE
        packed.addfile(member, io.BytesIO())
    with pytest.raises(LaunchError, match=r"bad\.tar\.gz cannot be unpacked"):
        code.unpack(archive, target)
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.usefixtures("_filters")
def test_an_archive_gives_no_rights(tmp_path: Path) -> None:
    archive, target = tmp_path / "code.tar.gz", tmp_path / "target"
    with tarfile.open(archive, "w:gz") as packed:
        for name, kind, mode in (("a", tarfile.DIRTYPE, 0), ("a/run.sh", tarfile.REGTYPE, 0o4777)):
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, mode
            packed.addfile(member, io.BytesIO())
    code.unpack(archive, target)
    assert (target / "a").stat().st_mode & 0o700 == 0o700
    assert (target / "a/run.sh").stat().st_mode & 0o7777 == 0o755


def test_what_is_no_archive_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_text("no archive")
    with pytest.raises(LaunchError, match=r"a\.tar\.gz cannot be unpacked"):
        code.unpack(tmp_path / "a.tar.gz", tmp_path / "target")
