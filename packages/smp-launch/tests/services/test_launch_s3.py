"""Jobs whose code, data, results and checkpoints are in an object store, a real HTTP server."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException
from smdistributed.modelparallel.launch.inputs import TrainingInput
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

SECRET = "a-secret-that-nobody-writes-down"
READS = """
import os, pathlib, sys
data = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])
print("files", *sorted(str(p.relative_to(data)) for p in data.rglob("*") if p.is_file()))
pathlib.Path(os.environ["SM_MODEL_DIR"], "size").write_text(str((data / "big").stat().st_size))
place = pathlib.Path(sys.argv[sys.argv.index("--to") + 1])
print("found", sorted(path.name for path in place.iterdir()))
(place / "step").write_text("1")
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty object store with a bucket; what reaches it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], skip_instance_cache=True)
    files.server = server
    files.call_s3("create_bucket", Bucket="bucket")
    yield files
    server.stop()


def make(tmp_path: Path, script: str = READS, **given: Any) -> PyTorch:
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    session = Session(root=tmp_path / "jobs", default_bucket="bucket")
    return PyTorch("train.py", source_dir=str(folder), sagemaker_session=session, **given)


def folder_of(estimator: PyTorch) -> JobFolder:
    assert estimator.latest_training_job is not None
    return estimator.sagemaker_session.job(estimator.latest_training_job.name)


def test_everything_is_in_the_store(tmp_path: Path, store: Any) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    # Larger than a part of a multipart upload.
    (data / "big").write_bytes(b"x" * (51 << 20))
    (data / "deep/a.txt").write_text("a")
    given = {
        "output_path": "s3://bucket/out",
        "code_location": "s3://bucket/code",
        "checkpoint_s3_uri": "s3://bucket/kept",
        "hyperparameters": {"to": "/opt/ml/checkpoints"},
    }
    estimator = make(tmp_path, **given)
    address = estimator.sagemaker_session.upload_data(str(data), key_prefix="data")
    assert address == "s3://bucket/data"
    for found in ("[]", "['step']"):
        estimator.fit({"train": address}, logs=False)
        log = (folder_of(estimator).logs / "algo-1.log").read_text()
        assert "files big deep/a.txt" in log
        assert f"found {found}" in log
    name = folder_of(estimator).name
    assert store.exists(f"bucket/code/{name}/source/sourcedir.tar.gz")
    assert estimator.model_data == f"s3://bucket/out/{name}/output/model.tar.gz"
    got = estimator.sagemaker_session.download_data(
        str(tmp_path / "got"), "bucket", f"out/{name}/output/"
    )
    with tarfile.open(got[0]) as archive:
        assert archive.extractfile("size").read() == str(51 << 20).encode()  # type: ignore[union-attr]
    assert store.cat("bucket/kept/step") == b"1"
    # Nothing of the job holds what opens the store.
    for path in folder_of(estimator).path.rglob("*"):
        if path.is_file() and path.name != "big":
            assert SECRET.encode() not in path.read_bytes(), path


def test_a_manifest_in_the_store_names_the_files(tmp_path: Path, store: Any) -> None:
    for name in ("a", "b", "deep/big"):
        store.pipe(f"bucket/data/{name}", b"x")
    store.pipe("bucket/m", b'[{"prefix": "s3://bucket/data/deep/"}, "big"]')
    given = TrainingInput("s3://bucket/m", s3_data_type="ManifestFile")
    estimator = make(tmp_path, READS.partition("place")[0])
    estimator.fit({"train": given}, logs=False)
    assert "files big\n" in (folder_of(estimator).logs / "algo-1.log").read_text()


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("s3://bucket/missing", "channel train: there is nothing at s3://bucket/missing"),
        ("s3://nowhere/data", "s3://nowhere/data cannot be listed: .*bucket does not exist"),
    ],
)
def test_data_that_is_not_there_fails_the_job(
    tmp_path: Path, store: Any, address: str, match: str
) -> None:
    with pytest.raises(UnexpectedStatusException, match=match):
        make(tmp_path).fit({"train": address}, logs=False)


def test_a_key_does_not_lead_out_of_its_channel(tmp_path: Path, store: Any) -> None:
    store.pipe("bucket/data/../../../../escaped", b"x")
    with pytest.raises(UnexpectedStatusException):
        make(tmp_path).fit({"train": "s3://bucket/data"}, logs=False)
    assert not list(tmp_path.rglob("escaped"))
    with pytest.raises(ConfigError, match="must not have"):
        make(tmp_path).fit({"train": "s3://bucket/data/../../escaped"})


def test_a_store_that_goes_away_fails_the_job_and_keeps_the_results(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    go_on = tmp_path / "go-on"
    script = f"""
import os, pathlib, time
pathlib.Path(os.environ["SM_MODEL_DIR"], "weights").touch()
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.05)
"""
    estimator = make(tmp_path, script, output_path="s3://bucket/out")
    estimator.fit(wait=False)
    store.server.stop()
    go_on.touch()
    job = estimator.latest_training_job
    assert job is not None
    with pytest.raises(
        UnexpectedStatusException, match=r"results were not kept: .*s3://bucket/out"
    ):
        job.wait(logs=False)
    assert (folder_of(estimator).model / "weights").exists()
