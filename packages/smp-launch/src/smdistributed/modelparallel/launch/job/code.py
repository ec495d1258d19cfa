"""The archive of a script and what it imports: packed by an estimator, unpacked in a job.

Source: estimator interface, section 1 (script, code folder, extra code).
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import LaunchError

#: Where the archive of a job is, below the place for code and the name of the job.
ARCHIVE = "source/sourcedir.tar.gz"
#: What nobody imports.
_LEFT_OUT = ("__pycache__", ".git")
#: Container paths of a script that an image has; the script is looked for in the code folder.
_CONTAINER = "/opt/ml/code/"


@dataclass(frozen=True)
class Code:
    """What a job is to run, on this machine.

    Attributes:
        program: the script, below the root of the archive.
        files: name in the archive -> the file or folder.
    """

    program: str
    files: dict[str, Path]

    def pack(self, target: Path) -> None:
        """Writes the archive; the same files give the same bytes."""
        with (
            target.open("xb") as stream,
            gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name, path in sorted(self.files.items()):
                archive.add(path.resolve(), name, filter=_plain)


def collect(
    entry_point: str,
    source_dir: str | None,
    dependencies: Iterable[str],
    base: Path | None = None,
) -> Code:
    """Returns what is to be shipped.

    Args:
        entry_point: the script.
        source_dir: the folder that it is in, or None.
        dependencies: files and folders beside it.
        base: what the paths are relative to, and inside of; None for the present folder.

    Raises:
        ConfigError: something is missing, or two things have one name.
    """
    given = entry_point.removeprefix("file://").removeprefix(_CONTAINER)
    if source_dir is None:
        script = _within(base, given)
        program, files = script.name, {script.name: script}
    else:
        folder = _within(base, source_dir.removeprefix("file://"))
        if not folder.is_dir():
            raise ConfigError(
                f"source_dir must be a folder; there is none at {folder.absolute()}: correct it."
            )
        script, program = folder / given, given
        if not script.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"entry_point must be inside source_dir ({folder.absolute()}); got {entry_point}: "
                "name it relative to source_dir."
            )
        files = {path.name: path for path in sorted(folder.iterdir()) if path.name not in _LEFT_OUT}
    if not script.is_file():
        raise ConfigError(
            f"entry_point must be a file; there is none at {script.absolute()}: correct it, or "
            "give its folder as source_dir."
        )
    for each in dependencies:
        path = _within(base, each)
        if not path.exists():
            raise ConfigError(f"a dependency must exist; {path.absolute()} does not: correct it.")
        name = path.resolve().name
        if name in files:
            raise ConfigError(
                f"dependencies are placed beside the script under their own names; {name} is there "
                f"twice ({files[name].absolute()} and {path.absolute()}): rename one."
            )
        files[name] = path
    return Code(program, files)


def _within(base: Path | None, name: str) -> Path:
    if base is None:
        return Path(name).expanduser()
    path = base / name
    if not path.resolve().is_relative_to(base.resolve()):
        raise ConfigError(
            f"with git_config paths are inside the repository; got {name!r}: name it relative to "
            "the repository."
        )
    return path


def unpack(archive: Path, target: Path) -> None:
    """Unpacks an archive of code.

    Raises:
        LaunchError: it is no archive, or something in it would lie outside the folder.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as opened:
            if hasattr(tarfile, "data_filter"):
                opened.extractall(target, filter="data")
            else:  # Python before 3.11.4
                _extract(opened, target)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise LaunchError(f"{archive.name} cannot be unpacked: {error}.") from error


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    """Extracts as the filter would; of links and devices, which it looks at, none."""
    root = target.resolve()
    for member in archive:
        lies_inside = (root / member.name).resolve().is_relative_to(root)
        if not lies_inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(
                f"{member.name} is no file or folder inside of it; links need Python 3.11.4"
            )
        member.mode = 0o755 if member.isdir() else member.mode & 0o755 | 0o600
        archive.extract(member, target)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out who owns a file and when it changed."""
    if Path(member.name).name in _LEFT_OUT:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member
