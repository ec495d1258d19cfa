"""Files of TensorBoard are at their address while the job runs."""

from __future__ import annotations

from typing import Any

import pytest
from job_bench import folder_of, make

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.debugger import TensorBoardOutputConfig
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


def test_files_of_tensorboard_are_kept_while_they_grow(session: Session) -> None:
    kept = session.root / "s3/bucket/logs/job-1/tensorboard-output/run/events.out"
    # Never still for a moment, and it ends when both versions have been seen there.
    script = f"""
import pathlib, sys, time
place = pathlib.Path(sys.argv[2]) / "run"
place.mkdir()
kept, most = pathlib.Path({str(kept)!r}), time.monotonic() + 60
sizes = set()
while len(sizes) < 2:
    assert time.monotonic() < most
    with (place / "events.out").open("a") as stream:
        stream.write("record\\n")
    if kept.exists():
        sizes.add(kept.stat().st_size)
    time.sleep(0.05)
"""
    config = TensorBoardOutputConfig("s3://bucket/logs/")
    given = {"hyperparameters": {"to": "/opt/ml/output/tensorboard"}}
    estimator = make(session, script, tensorboard_output_config=config, **given)
    estimator.fit(logs=False, job_name="job-1")
    here = folder_of(estimator).output / "tensorboard/run/events.out"
    assert kept.read_text() == here.read_text()
    document = folder_of(estimator).request().as_json()
    assert document["TensorBoardOutputConfig"] == {
        "S3OutputPath": "s3://bucket/logs/",
        "LocalPath": "/opt/ml/output/tensorboard",
    }


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("s3://bucket/logs", "must be a TensorBoardOutputConfig; got 's3://bucket/logs'"),
        (None, "needs s3_output_path, an address or a folder; got None"),
    ],
)
def test_a_place_must_be_named(session: Session, given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(session, "", tensorboard_output_config=given or TensorBoardOutputConfig(given))
