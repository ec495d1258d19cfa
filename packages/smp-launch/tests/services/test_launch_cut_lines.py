"""An object store whose line is cut in the middle of a copy, and comes back, or does not."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.pytorch import PyTorch
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

LIMIT_SECONDS = 90
NUM_BYTES = 8 << 20


class Line:
    """What lies between a client and a server; it can be cut after so many bytes."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self.bytes_left: int | None = None
        self.is_away = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_away:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                target.sendall(data)
                if self.bytes_left is not None:
                    self.bytes_left -= len(data)
                    if self.bytes_left < 0:
                        self.is_away, self.bytes_left = True, None
                        self._cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                # A reset, at which both ends give up, and not a silence.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An object store; what reaches it directly, and the line that jobs take."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    line = Line(port)
    for name, text in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}",
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, text)
    files = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True)
    files.call_s3("create_bucket", Bucket="cut-lines")
    files.line = line
    yield files
    line.close()
    server.stop()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def make(tmp_path: Path, script: str, **given: Any) -> PyTorch:
    (tmp_path / "train.py").write_text(script)
    session = Session(root=tmp_path / "jobs", default_bucket="cut-lines")
    return PyTorch(str(tmp_path / "train.py"), sagemaker_session=session, **given)


def folder_of(estimator: PyTorch) -> JobFolder:
    assert estimator.latest_training_job is not None
    return estimator.sagemaker_session.job(estimator.latest_training_job.name)


def test_checkpoints_are_copied_when_the_line_is_back(tmp_path: Path, store: Any) -> None:
    script = f"""
import pathlib, sys, time
place = pathlib.Path(sys.argv[2])
(place / "big.pt").write_bytes(b"w" * {NUM_BYTES})
(place / "latest").write_text("big.pt")
while not pathlib.Path({str(tmp_path / "go-on")!r}).exists():
    time.sleep(0.05)
"""
    given = {"hyperparameters": {"to": "/opt/ml/checkpoints"}}
    estimator = make(tmp_path, script, checkpoint_s3_uri="s3://cut-lines/kept", **given)
    # Some of the file passes; what says that it is complete does not.
    store.line.bytes_left = NUM_BYTES // 2
    estimator.fit(wait=False)
    log = folder_of(estimator).logs / "algo-1.log"
    wait_until(lambda: store.line.is_away, "nothing is copied")
    wait_until(lambda: "It is tried again" in log.read_text(), "nothing is said")
    store.invalidate_cache()
    assert not store.exists("cut-lines/kept/latest")
    store.line.is_away = False

    def is_there() -> bool:
        store.invalidate_cache()
        return bool(store.exists("cut-lines/kept/latest"))

    wait_until(is_there, "it is not tried again")
    assert store.size("cut-lines/kept/big.pt") == NUM_BYTES
    (tmp_path / "go-on").touch()
    job = estimator.latest_training_job
    assert job is not None
    job.wait(logs=False)
    assert job.describe()["TrainingJobStatus"] == "Completed"


def test_data_that_stops_coming_fails_the_job(tmp_path: Path, store: Any) -> None:
    store.pipe("cut-lines/data/big", os.urandom(NUM_BYTES))
    store.line.bytes_left = NUM_BYTES // 2
    estimator = make(tmp_path, "print('never')")
    with pytest.raises(UnexpectedStatusException, match=r"s3://cut-lines/data.* cannot be copied"):
        estimator.fit({"train": "s3://cut-lines/data"}, logs=False)
    assert store.line.is_away
    # No half of a file has the name of the whole.
    assert not list(folder_of(estimator).data.rglob("big"))
