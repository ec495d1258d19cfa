"""Releases, made in a copy of the repository with a history of its own."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import public_names
import pytest
import release
from packaging.requirements import Requirement
from release import DEPENDENTS, PACKAGES, Refusal, Repository

HERE = Repository(release.ROOT)
#: What a release reads or writes.
FILES = ("pyproject.toml", "CHANGELOG.md", "public_names.txt", "changelog.d")


def metadata(repository: Repository, package: str) -> dict[str, object]:
    project = tomllib.loads((repository.folder(package) / "pyproject.toml").read_text())["project"]
    assert isinstance(project, dict)
    return project


def common_needed(repository: Repository, package: str) -> str:
    dependencies = metadata(repository, package)["dependencies"]
    assert isinstance(dependencies, list)
    (found,) = (text for text in dependencies if Requirement(text).name == "smp-common")
    return str(found)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A copy in which nothing is released yet and each package has a fragment."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A Tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
    copied = Repository(tmp_path)
    for package in PACKAGES:
        copied.folder(package).mkdir(parents=True)
        for name in FILES:
            source, target = HERE.folder(package) / name, copied.folder(package) / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        (copied.folder(package) / "changelog.d/+topic.changed.md").write_text("It is faster.\n")
    copied.git("init", "--quiet")
    commit(copied)
    return copied


def commit(repository: Repository) -> None:
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "Change")


def higher(version: str) -> str:
    major, minor, patch = version.split(".")
    return f"{major}.{minor}.{int(patch) + 1}"


def refuse(repository: Repository, match: str, package: str, version: str) -> None:
    with pytest.raises(Refusal, match=match):
        release.main([package, version], repository)
    assert not repository.git("tag", "--list", f"{package}-v{version}")


def test_the_tools_know_every_package() -> None:
    there = {path.name for path in (release.ROOT / "packages").iterdir()}
    assert there == set(PACKAGES) == set(public_names.MODULES)


@pytest.mark.parametrize("framework", DEPENDENTS)
def test_a_framework_package_needs_what_runs_with_smp_common_of_this_tree(framework: str) -> None:
    wanted = release.common_range(HERE.version("smp-common"))
    assert common_needed(HERE, framework) == f"smp-common{wanted}"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.1.2", ">=0.1.2,<0.2"), ("1.2.3", ">=1.2.3,<2"), ("0.2.0.dev0", ">=0.2.0.dev0,<0.3")],
)
def test_common_range_ends_before_the_next_break(version: str, wanted: str) -> None:
    assert release.common_range(version) == wanted


def test_draft_shows_every_fragment(capfd: pytest.CaptureFixture[str]) -> None:
    release.main(["--draft"], HERE)
    shown = " ".join(capfd.readouterr().out.split())
    fragments = [
        HERE.folder(p) / "changelog.d" / name for p in PACKAGES for name in HERE.fragments(p)
    ]
    missing = [path.name for path in fragments if " ".join(path.read_text().split()) not in shown]
    assert not missing, "their type is none of towncrier's"


def test_a_release_of_smp_common(copy: Repository) -> None:
    before = copy.version("smp-common")
    version = higher(before)
    release.main(["smp-common", version], copy)
    folder = copy.folder("smp-common")

    assert copy.version("smp-common") == version
    assert not copy.fragments("smp-common")
    changelog = (folder / "CHANGELOG.md").read_text()
    assert f"## {version} (" in changelog
    assert "It is faster." in changelog
    assert not any(by.endswith(".md") for by in public_names.read(folder).values())
    for framework in DEPENDENTS:
        wanted = f"smp-common{release.common_range(version)}"
        assert common_needed(copy, framework) == wanted
        assert copy.fragments(framework)
    assert not copy.git("status", "--porcelain")
    assert copy.git("describe", "--exact-match").strip() == f"smp-common-v{version}"
    release.main(["--verify", f"smp-common-v{version}"], copy)


def test_a_framework_package_is_released_after_smp_common(copy: Repository) -> None:
    version = higher(copy.version("smp-common"))
    refuse(copy, r"has the fragments .*: release smp-common first", "smp-torch", "1.0.0")
    release.main(["smp-common", version], copy)
    release.main(["smp-torch", "1.0.0"], copy)
    assert copy.version("smp-torch") == "1.0.0"
    assert copy.version("smp-common") == version
    release.main(["--verify", "smp-torch-v1.0.0"], copy)
    copy.git("tag", "--delete", f"smp-common-v{version}")
    refuse(copy, r"has no tag smp-common-v.*: release smp-common first", "smp-tf", "1.0.0")


def test_refusals_of_releases(copy: Repository) -> None:
    refuse(copy, r"Versions rise; got 0\.0\.1 after smp-common", "smp-common", "0.0.1")
    refuse(copy, r"PEP 440 normalizes it; got '1\.0-a': use 1\.0a0", "smp-common", "1.0-a")
    (copy.folder("smp-tf") / "stray.py").touch()
    refuse(copy, r"clean tree; changed are\n\?\? packages/smp-tf/stray\.py", "smp-common", "1.0.0")
    commit(copy)
    release.main(["smp-common", "1.0.0"], copy)
    refuse(copy, r"smp-common has no fragments", "smp-common", "1.0.1")
    with pytest.raises(Refusal, match=r"there is a tag smp-common-v1\.0\.0"):
        release.main(["smp-common", "1.0.0"], copy)


def test_refusals_of_tags(copy: Repository) -> None:
    for tag in ("v1.0.0", "smp-jax-v1.0.0", "smp-torch"):
        with pytest.raises(Refusal, match=f"A tag is a package .* got '{tag}'"):
            release.main(["--verify", tag], copy)
    with pytest.raises(Refusal, match=r"has version 9\.0\.0 and no fragments; got fragments"):
        release.main(["--verify", "smp-torch-v9.0.0"], copy)
    for fragment in copy.fragments("smp-torch"):
        (copy.folder("smp-torch") / "changelog.d" / fragment).unlink()
    with pytest.raises(Refusal, match=r"has version 9\.0\.0 and no fragments; got version 0\."):
        release.main(["--verify", "smp-torch-v9.0.0"], copy)


def test_the_script_tells_how_it_is_used() -> None:
    done = subprocess.run(
        [release.sys.executable, "tools/release.py", "smp-torch"],
        cwd=release.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "name a package and its new version" in done.stderr
