"""Releases a package: its version, its changelog, a commit and a tag. Pushes nothing.

Usage::

    python tools/release.py smp-torch 1.2.0            # changes files, commits and tags
    python tools/release.py --verify smp-torch-v1.2.0  # is this tree what the tag says?
    python tools/release.py --draft                    # what the changelogs will say
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import public_names
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
COMMON = "smp-common"
#: What needs smp-common.
DEPENDENTS = ("smp-torch", "smp-tf", "smp-launch")
PACKAGES = (COMMON, *DEPENDENTS)
_VERSION_LINE = re.compile(r'(?<=^version = ")[^"]*(?="$)', re.MULTILINE)
_COMMON_RANGE = re.compile(rf'(?<="{COMMON})[^"]*(?=")')


class Refusal(SystemExit):
    """What is asked for breaks a rule of releases; its text ends the script."""


def tag_of(package: str, version: str) -> str:
    """Returns the tag of a release."""
    return f"{package}-v{version}"


def parse_tag(tag: str) -> tuple[str, str]:
    """Returns the package and the version of a tag.

    Raises:
        Refusal: no release has such a tag.
    """
    package, separator, version = tag.rpartition("-v")
    if not separator or package not in PACKAGES:
        known = ", ".join(PACKAGES)
        raise Refusal(
            f"A tag is a package ({known}), '-v' and a version; got {tag!r}: use one such as "
            f"{tag_of('smp-torch', '1.2.0')}."
        )
    return package, _canonical(version)


def common_range(version: str) -> str:
    """Returns the versions of smp-common that run what was made with this one.

    Before 1.0.0 the second number changes when something breaks, from then on the first.
    """
    release = Version(version)
    end = f"{release.major + 1}" if release.major else f"0.{release.minor + 1}"
    return f">={version},<{end}"


class Repository:
    """The files and the history that a release changes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, package: str) -> Path:
        """Returns the folder of a package."""
        return self.root / "packages" / package

    def version(self, package: str) -> str:
        """Returns the version that a package declares."""
        text = (self.folder(package) / "pyproject.toml").read_text()
        return str(tomllib.loads(text)["project"]["version"])

    def fragments(self, package: str) -> list[str]:
        """Returns the names of the changelog fragments that wait for a release."""
        return sorted(path.name for path in (self.folder(package) / "changelog.d").glob("*.md"))

    def git(self, *words: str) -> str:
        """Runs git; returns what it printed."""
        command = ["git", "-C", str(self.root), *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def has_tag(self, tag: str) -> bool:
        """Tells whether there is such a tag."""
        return bool(self.git("tag", "--list", tag))

    def edit(self, package: str, version: str) -> None:
        """Writes the version; that of smp-common also to the ranges of what needs it."""
        self._replace(package, _VERSION_LINE, version)
        if package == COMMON:
            for dependent in DEPENDENTS:
                self._replace(dependent, _COMMON_RANGE, common_range(version))

    def _replace(self, package: str, place: re.Pattern[str], text: str) -> None:
        file = self.folder(package) / "pyproject.toml"
        file.write_text(place.sub(text, file.read_text(), count=1))


def check(repository: Repository, package: str, version: str) -> None:
    """Checks that a package can be released as this version from the tree as it is.

    Raises:
        Refusal: it cannot.
    """
    if changed := repository.git("status", "--porcelain"):
        raise Refusal(f"A release starts from a clean tree; changed are\n{changed}commit them.")
    tag, current = tag_of(package, version), repository.version(package)
    if repository.has_tag(tag):
        raise Refusal(f"A version is released once; there is a tag {tag}: choose a higher version.")
    if Version(version) < Version(current):
        raise Refusal(
            f"Versions rise; got {version} after {package} {current}: choose a higher version."
        )
    if not repository.fragments(package):
        raise Refusal(
            f"A release changes something; {package} has no fragments in changelog.d: add those "
            f"that are missing, or release nothing."
        )
    if package != COMMON:
        _check_common(repository, package)


def _check_common(repository: Repository, package: str) -> None:
    """What was tested together is published in order: smp-common before what needs it."""
    version = repository.version(COMMON)
    tag, waiting = tag_of(COMMON, version), repository.fragments(COMMON)
    if waiting or not repository.has_tag(tag):
        reason = f"the fragments {', '.join(waiting)}" if waiting else f"no tag {tag}"
        raise Refusal(
            f"{package} needs a released {COMMON}; {COMMON} {version} has {reason}: release "
            f"{COMMON} first."
        )


def release(repository: Repository, package: str, version: str) -> None:
    """Writes version, changelog and names of a package; commits and tags them."""
    version = _canonical(version)
    check(repository, package, version)
    folder = repository.folder(package)
    repository.edit(package, version)
    public_names.release(folder, version)
    _towncrier(folder, "--yes", "--version", version)
    repository.git("commit", "--quiet", "--all", "--message", f"Release {package} {version}")
    tag = tag_of(package, version)
    repository.git("tag", "--annotate", tag, "--message", f"{package} {version}")
    print(f"{tag} is made here. Look at it: git show {tag}")
    print(f"Publish it: git push origin HEAD {tag}")


def verify(repository: Repository, tag: str) -> None:
    """Checks that the tree is what a tag says.

    Raises:
        Refusal: it is not.
    """
    package, version = parse_tag(tag)
    declared, waiting = repository.version(package), repository.fragments(package)
    if declared != version or waiting:
        got = f"fragments ({', '.join(waiting)})" if waiting else f"version {declared}"
        raise Refusal(
            f"The tree of tag {tag} has version {version} and no fragments; got {got}: delete the "
            f"tag and make it with 'nox -s release -- tag {package} {version}'."
        )


def draft(repository: Repository) -> None:
    """Prints what the changelogs will say of the changes since the last releases."""
    for package in PACKAGES:
        print(f"# {package}", flush=True)
        _towncrier(repository.folder(package), "--draft", "--version", "Unreleased")


def _towncrier(folder: Path, *words: str) -> None:
    # In the folder: towncrier asks git about fragments from where it runs.
    subprocess.run([sys.executable, "-m", "towncrier", "build", *words], check=True, cwd=folder)


def _canonical(version: str) -> str:
    try:
        canonical = str(Version(version))
    except InvalidVersion:
        canonical = ""
    if canonical != version:
        raise Refusal(
            f"A version is written as PEP 440 normalizes it; got {version!r}: use "
            f"{canonical or '1.2.0'}."
        )
    return version


def main(words: list[str], repository: Repository) -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", metavar="TAG", help="check that this tree is what a tag says")
    action.add_argument("--draft", action="store_true", help="show what changelogs will say")
    parser.add_argument("package", nargs="?", choices=PACKAGES)
    parser.add_argument("version", nargs="?")
    given = parser.parse_args(words)
    if given.verify:
        verify(repository, given.verify)
    elif given.draft:
        draft(repository)
    elif given.version:
        release(repository, given.package, given.version)
    else:
        parser.error("name a package and its new version, such as smp-torch 1.2.0")


if __name__ == "__main__":
    main(sys.argv[1:], Repository(ROOT))
