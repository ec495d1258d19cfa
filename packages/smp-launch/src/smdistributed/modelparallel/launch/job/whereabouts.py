"""Where the ranks of a job are that runs on this machine; its smprun is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.launcher import status
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.job.commands import SMPRUN
from smdistributed.modelparallel.launch.job.folder import JobFolder


def told(folder: JobFolder) -> str:
    """Returns where the ranks are, in lines.

    Raises:
        LaunchError: no smprun of the job runs on this machine.
    """
    for pid in _smpruns(folder.name):
        with contextlib.suppress(SMPError):
            return status.told_by(pid).text
    raise LaunchError(
        "only a job of MPI that runs on this machine can be asked where its ranks are; received "
        f"{folder.name}, which has none here: 'smp-launch show {folder.name}' says how it stands."
    )


def _smpruns(name: str) -> Iterator[int]:
    """Yields processes that may be the smprun of a job: those that wait for one look like it."""
    own = f"TRAINING_JOB_NAME={name}".encode()
    words = "\0".join(SMPRUN).encode() + b"\0"
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            has_words = entry.name.isdecimal() and words in (entry / "cmdline").read_bytes()
            if has_words and own in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
