from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_bench import processes_of, wait_until

from smdistributed.modelparallel.launch.session import Session


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session with a folder of its own, of whose jobs nothing is left at the end."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    made = Session(root=tmp_path / "jobs")
    yield made
    wait_until(lambda: not processes_of(made.root), "processes are left")
