"""Jobs that read streams, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_bench import folder_of, make

from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException
from smdistributed.modelparallel.launch.inputs import TrainingInput
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

STREAMS = """
import os, sys
base, host = os.environ["SM_CHANNEL_TRAIN"], os.environ["SM_CURRENT_HOST"]
for epoch in range(2):
    with open(f"{base}_{epoch}") as stream:
        print(host, "epoch", epoch, stream.read().split(), flush=True)
"""


@pytest.mark.parametrize("by_mpi", [pytest.param(False, marks=pytest.mark.slow), True])
def test_streams_are_dealt_out_to_hosts(session: Session, tmp_path: Path, by_mpi: bool) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in "abc":
        (data / name).write_text(f"{name}\n")
    given = TrainingInput(str(data), distribution="ShardedByS3Key", input_mode="Pipe")
    estimator = make(session, STREAMS, instance_count=2, ranks=int(by_mpi))
    estimator.fit({"train": given}, logs=False)
    logs = folder_of(estimator).logs
    said = "".join(path.read_text() for path in logs.glob("algo-*.log"))
    for host, share in (("algo-1", ["a", "c"]), ("algo-2", ["b"])):
        for epoch in range(2):
            assert f"{host} epoch {epoch} {share}" in said


def test_a_stream_that_cannot_be_read_fails_the_job(session: Session, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("plain")
    given = TrainingInput(str(tmp_path / "data"), input_mode="Pipe", compression="Gzip")
    # A script that sees the end of its stream and goes on all the same.
    estimator = make(
        session, STREAMS.replace("range(2)", "range(1)") + "import time; time.sleep(60)"
    )
    match = "pipe-algo-1: StorageError: channel train: .*/data/a cannot be streamed: Not a gzipped"
    with pytest.raises(UnexpectedStatusException, match=match):
        estimator.fit({"train": given}, logs=False)
