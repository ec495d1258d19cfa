"""Installs what ``requirements.txt`` of a script lists, for its job alone.

pip says what is missing beside what this Python has, and puts that into the folder of the job: the
user's environment stays as it is, and what it has already is not fetched again.

Source: estimator interface, section 1 (code folder); what containers of the service do with it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.request import hyperparameters as names

NAME = "requirements.txt"
_TICK_SECONDS = 0.2
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install")
_WAY_OUT = "install what the file lists in this environment, and leave the file out"


def listed(values: Mapping[str, Any]) -> str:
    """Returns the name of the file, from all hyperparameters; empty where a job wants none read."""
    return str(values.get(names.REQUIREMENTS, "" if names.DRIVER in values else NAME))


def install(folder: JobFolder, name: str, log: Path, go_on: Callable[[], None]) -> int:
    """Installs what is missing; returns how many distributions.

    Args:
        folder: of the job.
        name: of the file, in the folder of the code; it need not be there.
        log: gets what pip says.
        go_on: called again and again; raises to end the work.

    Raises:
        LaunchError: pip is not there, or cannot do it.
    """
    if not (folder.code / name).is_file():
        return 0
    with tempfile.TemporaryDirectory(prefix="smp-") as place:
        report = Path(place, "report.json")
        planned = ("--dry-run", "--quiet", "--report", str(report), "--requirement", name)
        _run((*_PIP, *planned), name, folder.code, log, go_on)
        missing = [_pinned(each) for each in json.loads(report.read_text())["install"]]
        if not missing:
            return 0
        pins = Path(place, "pins.txt")
        pins.write_text("\n".join(missing))
        chosen = ("--no-deps", "--target", str(folder.packages), "--requirement", str(pins))
        _run((*_PIP, *chosen), name, folder.code, log, go_on)
    return len(missing)


def _pinned(found: dict[str, Any]) -> str:
    """Returns a requirement that nothing else meets."""
    name, source = found["metadata"]["name"], found["download_info"]
    if not found["is_direct"]:
        return f"{name}=={found['metadata']['version']}"
    if about := source.get("vcs_info"):
        return f"{name} @ {about['vcs']}+{source['url']}@{about['commit_id']}"
    return f"{name} @ {source['url']}"


def _run(
    words: tuple[str, ...], name: str, cwd: Path, log: Path, go_on: Callable[[], None]
) -> None:
    before = log.stat().st_size if log.exists() else 0
    with log.open("ab") as stream:
        process = subprocess.Popen(
            words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
    try:
        while process.poll() is None:
            go_on()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        said = log.read_bytes()[before:].decode(errors="replace").strip().splitlines()
        last = next((line for line in reversed(said) if "ERROR" in line or "No module" in line), "")
        raise LaunchError(f"{name} cannot be installed: {last or said[-1:]}: {_WAY_OUT}.")
