"""Jobs on disks that are full, or that nobody may write: real ones, in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_bench import folder_of, make, processes_of, wait_until

from smdistributed.modelparallel.launch.exceptions import StorageError, UnexpectedStatusException
from smdistributed.modelparallel.launch.session import Session


def can_mount() -> bool:
    """Tells whether this process may put a file system somewhere."""
    words = ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    try:
        return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not can_mount(), reason="needs root, and file systems in memory"),
]

FILLS = """
import os, pathlib, time
pathlib.Path(os.environ["SM_MODEL_DIR"], "ready").touch()
with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "much"), "wb", buffering=0) as stream:
    while True:
        stream.write(b"x" * 4096)
"""


@pytest.fixture
def disk(session: Session) -> Iterator[Path]:
    """A small file system for the jobs of the session, of which nothing runs at the end."""
    session.root.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=400k,mode=700", "tmpfs", str(session.root))
    subprocess.run(mount, check=True)
    yield session.root
    wait_until(lambda: not processes_of(session.root), "processes are left")
    subprocess.run(("umount", "--lazy", str(session.root)), check=True)


def test_a_disk_that_gets_full_is_a_failed_job(session: Session, disk: Path) -> None:
    estimator = make(session, FILLS)
    with pytest.raises(UnexpectedStatusException, match=r"No space left on device|disk is full"):
        estimator.fit(logs=False)
    # Whether it could still be written down or not, nobody sees it in progress.
    assert session.observe(folder_of(estimator)).training_job_status == "Failed"


def test_a_disk_that_nobody_may_write_starts_nothing(session: Session, disk: Path) -> None:
    subprocess.run(("mount", "-o", "remount,ro", str(disk)), check=True)
    with pytest.raises(StorageError, match=r"jobs must be writable; .*read-only.*SMP_JOBS"):
        make(session, "print(1)").fit()
    below = Session(root=disk / "below")
    with pytest.raises(StorageError, match=r"jobs must be writable; .*Read-only file system"):
        below.start(make(session, "")._request("job-1", None, None))
    assert not list(disk.iterdir())


@pytest.mark.slow
def test_a_folder_that_gets_read_only_is_a_failed_job(session: Session) -> None:
    script = """
import os, pathlib, time
pathlib.Path(os.environ["SM_MODEL_DIR"], "ready").touch()
while not pathlib.Path(os.environ["SM_MODEL_DIR"], "go-on").exists():
    time.sleep(0.05)
"""
    estimator = make(session, script)
    estimator.fit(wait=False)
    job = folder_of(estimator)
    wait_until(lambda: (job.model / "ready").exists(), "the script does not start")
    if subprocess.run(("chattr", "+i", str(job.path)), capture_output=True).returncode:
        pytest.skip("needs a file system whose folders can be made immutable")
    try:
        (job.model / "go-on").touch()
        wait_until(lambda: session.observe(job).is_final, "in progress for ever")
        assert "the supervisor of the job is gone" in str(session.observe(job).failure_reason)
    finally:
        subprocess.run(("chattr", "-i", str(job.path)), check=True)
