"""Endpoints, in processes of their own: KServe's server behind a socket."""

from __future__ import annotations

import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch import cli
from smdistributed.modelparallel.launch.deserializers import JSONDeserializer
from smdistributed.modelparallel.launch.exceptions import LaunchError, ModelError
from smdistributed.modelparallel.launch.pytorch import PyTorchModel
from smdistributed.modelparallel.launch.serializers import CSVSerializer
from smdistributed.modelparallel.launch.session import Session

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

SCRIPT = """
import json, os
def model_fn(folder):
    print("loading in", os.getpid(), flush=True)
    return float(open(os.path.join(folder, "w")).read())
def predict_fn(data, w):
    if data.numel() == 3:
        raise RuntimeError("planted")
    return data * w
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session of whose endpoints nothing is left at the end."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    made = Session(root=tmp_path / "jobs")
    yield made
    for name in made.serving.endpoints():
        made.serving.delete_endpoint(name)
    assert not servers(tmp_path)


def servers(root: Path) -> list[int]:
    """Returns the processes of endpoints."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_text()
            except OSError:
                continue
            if str(root) in words and "serving.server" in words:
                found.append(int(entry.name))
    return found


def model(session: Session, tmp_path: Path, script: str = SCRIPT) -> PyTorchModel:
    """Returns a model, of a script beside its archive."""
    (tmp_path / "w").write_text("2.0")
    (tmp_path / "infer.py").write_text(script)
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "w", "w")
    return PyTorchModel(
        model_data=str(tmp_path / "model.tar.gz"),
        role="role",
        entry_point=str(tmp_path / "infer.py"),
        sagemaker_session=session,
        name="twice",
    )


def listening(process: int) -> set[str]:
    """Returns the sockets of the network that a process listens on."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        own.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in own:
                found.add(words[1])
    return found


def test_an_endpoint_from_deploy_to_its_end(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor = model(session, tmp_path).deploy(1, "local")
    assert predictor.endpoint_name == "twice"
    answer = predictor.predict(np.array([1.5, 2.0], dtype="float32"))
    assert (answer.tolist(), answer.dtype) == ([3.0, 4.0], np.float32)
    predictor.serializer, predictor.deserializer = CSVSerializer(), JSONDeserializer()
    assert predictor.predict([[1, 2], [3, 4]]) == [[2.0, 4.0], [6.0, 8.0]]
    # KServe's own routes: TensorFlow Serving's form, whether it is ready, errors as JSON.
    serving = session.serving
    body = json.dumps({"instances": [[1.0, 2.0]]}).encode()
    kind = {"Content-Type": "application/json"}
    reply = serving.invoke("twice", body, kind, target="/v1/models/model:predict")
    assert json.loads(reply.body) == {"predictions": [[2.0, 4.0]]}
    with pytest.raises(ModelError, match='status 400: a request must have "instances"'):
        serving.invoke("twice", b"{}", kind, target="/v1/models/model:predict")
    with pytest.raises(ModelError, match="status 400: the request is no application/json"):
        serving.invoke("twice", b"{", kind)
    with pytest.raises(ModelError, match="status 500: RuntimeError : planted"):
        predictor.predict([1, 2, 3])
    with pytest.raises(ConfigError, match="there is an endpoint twice: delete it first"):
        model(session, tmp_path).deploy(1, "local")
    # Nothing of it is on the network, and its folder is the user's alone.
    (process,) = servers(tmp_path)
    assert listening(process) == set()
    assert (serving.place / "endpoints/twice").stat().st_mode & 0o077 == 0
    words = ["--jobs", str(session.root)]
    assert cli.main([*words, "endpoints"]) == 0
    assert "twice" in capsys.readouterr().out
    # Its process is killed: whoever looks knows.
    os.kill(process, signal.SIGKILL)
    with pytest.raises(LaunchError, match=r"twice (does not answer|must be InService)"):
        predictor.predict([1])
    assert serving.wait("twice").endpoint_status in ("Failed", "InService")
    assert cli.main([*words, "delete-endpoint", "twice"]) == 0
    assert serving.endpoints() == []


def test_a_model_that_cannot_be_loaded_is_a_failed_endpoint(
    session: Session, tmp_path: Path
) -> None:
    wrong = model(session, tmp_path, "def model_fn(folder): raise KeyError('weights')")
    with pytest.raises(LaunchError, match="endpoint twice is Failed: KeyError: 'weights'"):
        wrong.deploy(1, "local")
    session.serving.delete_endpoint("twice")
    session.serving.delete_endpoint_config("twice")
    session.serving.delete_model("twice")
    bare = model(session, tmp_path, "def predict_fn(data, model): return data")
    with pytest.raises(LaunchError, match=r"without model_fn.* the archive has w: define model_fn"):
        bare.deploy(1, "local")
