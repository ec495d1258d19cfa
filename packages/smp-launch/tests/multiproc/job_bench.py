"""What tests of jobs share."""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.launch.estimator import EstimatorBase
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session

LIMIT_SECONDS = 60


def processes_of(root: Path) -> list[int]:
    """Returns what runs with the folder of jobs in its command line, or started in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                place = f"{(entry / 'cmdline').read_text()}\0{os.readlink(entry / 'cwd')}"
            except OSError:
                continue
            if str(root) in place and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def make(session: Session, script: str, *, ranks: int = 0, **given: Any) -> PyTorch:
    """Returns an estimator; with ranks it is a job of MPI."""
    folder = session.root.parent / "code"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    if ranks:
        given["distribution"] = {"mpi": {"enabled": True, "processes_per_host": ranks}}
    return PyTorch("train.py", source_dir=str(folder), sagemaker_session=session, **given)


def folder_of(estimator: EstimatorBase) -> JobFolder:
    assert estimator.latest_training_job is not None
    return estimator.sagemaker_session.job(estimator.latest_training_job.name)


def names_in(archive: str) -> list[str]:
    with tarfile.open(archive) as opened:
        return opened.getnames()


def log_of(estimator: PyTorch) -> str:
    log = folder_of(estimator).logs / "algo-1.log"
    return log.read_text() if log.exists() else ""
