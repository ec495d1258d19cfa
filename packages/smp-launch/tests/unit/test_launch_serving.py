"""What serves, without a server: documents, contents, serializers, requests over a socket."""

from __future__ import annotations

import io
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch import deserializers, serializers
from smdistributed.modelparallel.launch.exceptions import (
    LaunchError,
    ModelError,
    UnknownEndpointError,
)
from smdistributed.modelparallel.launch.predictor import Predictor
from smdistributed.modelparallel.launch.pytorch import PyTorch, PyTorchModel
from smdistributed.modelparallel.launch.serving import content, fetching, wire
from smdistributed.modelparallel.launch.serving.folder import EndpointFolder, EndpointStatus
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.tensorflow import TensorFlow

IMAGE = "registry/pytorch-inference:1.12.0-cpu-py38"
MODEL = {"ModelName": "m", "PrimaryContainer": {"Image": IMAGE, "ModelDataUrl": "s3://b/m.tar.gz"}}
CONFIG = {"EndpointConfigName": "c", "ProductionVariants": [{"ModelName": "m"}]}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(root=tmp_path / "jobs")


def test_models_and_configurations_are_kept_and_forgotten(session: Session) -> None:
    serving = session.serving
    assert serving.create_model(MODEL) == "m"
    assert serving.create_model(MODEL, may_exist=True) == "m"
    assert serving.create_endpoint_config(CONFIG) == "c"
    assert serving.model("m").container.model_data_url == "s3://b/m.tar.gz"
    with pytest.raises(ConfigError, match="already existing model m"):
        serving.create_model(MODEL)
    other = {**MODEL, "ExecutionRoleArn": "other"}
    with pytest.raises(ConfigError, match="already existing model m"):
        serving.create_model(other, may_exist=True)
    serving.delete_endpoint_config("c")
    serving.delete_model("m")
    # A name leads nowhere else.
    outside = serving.place / "m.json"
    outside.write_text(json.dumps(MODEL))
    for forget in (serving.delete_model, serving.delete_endpoint_config, serving.delete_endpoint):
        for name in ("m", "../m", ".."):
            with pytest.raises(UnknownEndpointError):
                forget(name)
    assert outside.exists()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"ModelName": "a/b"}, ConfigError, "ModelName must have letters and digits"),
        ({"PrimaryContainer": {}}, ConfigError, "needs ModelDataUrl"),
        ({"Containers": [{"ModelDataUrl": "s3://b/m"}]}, ConfigError, "has one container"),
        ({"Modelname": "m"}, ConfigError, "did you mean"),
        (
            {"PrimaryContainer": {"Image": "own:1", "ModelDataUrl": "a"}},
            UnsupportedError,
            "'own:1' is no image of PyTorch or TensorFlow",
        ),
    ],
)
def test_a_wrong_model_is_refused(
    session: Session, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        session.serving.create_model({**MODEL, **changes})


def test_wrong_arguments_of_deploy_are_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    estimator = PyTorch(str(tmp_path / "train.py"), sagemaker_session=session)
    with pytest.raises(LaunchError, match="there is no job yet: call fit"):
        estimator.deploy(1, "local")
    with pytest.raises(ConfigError, match="endpoint_type is of TensorFlow alone"):
        estimator.deploy(1, "local", endpoint_type="python")
    tensorflow = TensorFlow(entry_point=str(tmp_path / "train.py"), sagemaker_session=session)
    with pytest.raises(ConfigError, match="must be 'tensorflow-serving' or left out"):
        tensorflow.deploy(1, "local", endpoint_type="python")
    model = PyTorchModel("s3://b/m.tar.gz", sagemaker_session=session, name="m")
    for given, match in (
        ({"initial_instance_count": 0}, "at least 1"),
        ({"instance_type": "laptop"}, "must be 'local'"),
        ({"endpoint_nam": "a"}, "did you mean endpoint_name"),
        ({"serverless_inference_config": object()}, "is not offered"),
    ):
        with pytest.raises(ConfigError, match=match):
            model.deploy(**{"initial_instance_count": 1, "instance_type": "local", **given})
    with pytest.raises(ConfigError, match="model_data must be the address"):
        PyTorchModel()
    # Nothing serves, and nothing is left of the attempt.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("SMP_SERVE_PYTHON", raising=False)
    with (
        pytest.warns(ConfigWarning, match="no effect here: accelerator_type"),
        pytest.raises(UnsupportedError, match=r"pip install 'smp-launch\[serve\]'"),
    ):
        model.deploy(1, "local", accelerator_type="ml.eia1.medium")
    assert session.serving.endpoints() == []
    with pytest.raises(UnknownEndpointError):
        session.serving.config("m")


class _Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked, or as the request asks."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 400 if body == b"bad" else 200
        reply = b'{"error": "planted"}' if status == 400 else body
        self.send_response(status)
        self.send_header("Content-Type", self.headers["Accept"])
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def address_string(self) -> str:
        return ""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def echo(session: Session) -> Iterator[EndpointFolder]:
    """An endpoint that a thread answers for."""
    # Longer than what the kernel takes as the name of a socket.
    folder = EndpointFolder(session.root / ".serving/endpoints" / ("e" * 60), session.root)
    folder.path.mkdir(parents=True)
    status = EndpointStatus(
        endpoint_name=folder.path.name,
        endpoint_config_name="c",
        creation_time=0,
        last_modified_time=0,
    )
    folder.write_status(status.turned("InService"))
    lock = folder.lock()
    assert lock is not None
    with wire.short_name(folder.socket) as name:
        server = socketserver.ThreadingUnixStreamServer(name, _Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_predictor_asks_over_the_socket(session: Session, echo: EndpointFolder) -> None:
    both = (serializers.JSONSerializer(), deserializers.JSONDeserializer())
    predictor = Predictor(echo.path.name, session, *both)
    assert predictor.predict({"a": [1, 2]}) == {"a": [1, 2]}
    assert predictor.accept == ("application/json",)
    plain = Predictor(echo.path.name, session)
    assert plain.predict(b"ab", {"Accept": "x/y"}) == b"ab"
    with pytest.raises(ModelError, match="status 400: planted") as error:
        plain.predict(b"bad")
    assert error.value.status == 400
    for wrong, match in (
        (lambda: plain.predict([1]), "a request is bytes or a text"),
        (lambda: plain.predict(b"", {"Acept": "a"}), "initial_args has"),
        (lambda: plain.predict(b"", target_model="a"), "target_model must be left out"),
    ):
        with pytest.raises(ConfigError, match=match):
            wrong()
    with pytest.raises(UnknownEndpointError, match=f"the endpoints there are: {'e' * 60}"):
        Predictor("other", session).predict(b"")


def test_an_endpoint_whose_server_is_gone_has_failed(session: Session) -> None:
    folder = EndpointFolder(session.root / ".serving/endpoints/e", session.root)
    folder.path.mkdir(parents=True)
    status = EndpointStatus(
        endpoint_name="e", endpoint_config_name="c", creation_time=0, last_modified_time=0
    )
    folder.write_status(status.turned("InService"))
    found = session.serving.endpoint("e")
    assert found.endpoint_status == "Failed"
    assert "the server of the endpoint is gone" in str(found.failure_reason)
    with pytest.raises(LaunchError, match="must be InService to answer; it is Failed"):
        session.serving.invoke("e", b"", {})
    session.serving.delete_endpoint("e")
    assert session.serving.endpoints() == []


@pytest.mark.parametrize("kind", [content.JSON, content.JSON_LINES, content.CSV, content.NPY])
def test_every_kind_of_content_is_read_as_it_is_written(kind: str) -> None:
    rows = [[1.0, 2.5], [3.0, -4.0]]
    again = content.decode(content.encode(np.array(rows), kind), kind)
    assert np.asarray(again).tolist() == rows


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (b"{", content.JSON, "is no application/json"),
        (b"ab", content.NPY, "is no application/x-npy"),
        (b"ab", "image/png", "requests are"),
    ],
)
def test_content_that_cannot_be_read_is_the_fault_of_the_request(
    body: bytes, kind: str, match: str
) -> None:
    with pytest.raises(content.ContentError, match=match):
        content.decode(body, kind)
    with pytest.raises(content.ContentError, match="answers are"):
        content.accepted("image/png")
    assert content.accepted("image/png, text/csv; q=1") == content.CSV


def test_pickles_in_requests_and_answers_are_not_opened() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(content.ContentError):
        content.decode(stream.getvalue(), content.NPY)
    with pytest.raises(ValueError, match="allow_pickle"):
        deserializers.NumpyDeserializer().deserialize(
            io.BytesIO(stream.getvalue()), "application/x-npy"
        )
    with pytest.raises(ConfigError, match="runs code here"):
        deserializers.NumpyDeserializer(allow_pickle=True)


def test_a_script_that_only_trains_is_not_imported(tmp_path: Path) -> None:
    names = ("model_fn",)
    script = tmp_path / "train_only.py"
    script.write_text("raise SystemExit('trained again')")
    assert fetching.functions(script, names) is None
    script.write_text("from lib_of_train import model_fn")
    (tmp_path / "lib_of_train.py").write_text("def model_fn(folder): return folder")
    module = fetching.functions(script, names)
    assert module is not None
    assert module.model_fn("a") == "a"


@pytest.mark.parametrize(
    ("serializer", "data", "written"),
    [
        (serializers.JSONSerializer(), {"a": np.array([1, 2])}, '{"a": [1, 2]}'),
        (serializers.JSONLinesSerializer(), [{"a": 1}, {"a": 2}], '{"a": 1}\n{"a": 2}'),
        (serializers.CSVSerializer(), [[1, "a,b"], [2, "c"]], '1,"a,b"\n2,c'),
        (serializers.CSVSerializer(), np.array([1.5, 2.0]), "1.5,2.0"),
        (serializers.StringSerializer(), "ü", "ü".encode()),
        (serializers.IdentitySerializer(), b"a", b"a"),
        (serializers.JSONSerializer(), io.StringIO("[1]"), "[1]"),
    ],
)
def test_what_serializers_write(serializer: Any, data: Any, written: Any) -> None:
    assert serializer.serialize(data) == written


def test_arrays_go_and_come_back() -> None:
    written = serializers.NumpySerializer(dtype="float32").serialize([[1, 2]])
    found = deserializers.NumpyDeserializer().deserialize(io.BytesIO(written), "application/x-npy")
    assert (found.tolist(), found.dtype) == ([[1.0, 2.0]], np.float32)
    read = deserializers.CSVDeserializer().deserialize(io.BytesIO(b"1,a\n2,b\n"), "text/csv")
    assert read == [["1", "a"], ["2", "b"]]
    lines = deserializers.JSONLinesDeserializer().deserialize(io.BytesIO(b'{"a": 1}\n2\n'), "")
    assert lines == [{"a": 1}, 2]
    for wrong in ([], np.array([])):
        with pytest.raises(ConfigError, match="nothing to write"):
            serializers.NumpySerializer().serialize(wrong)
    with pytest.raises(ConfigError, match="NumpyDeserializer cannot read 'text/html'"):
        deserializers.NumpyDeserializer().deserialize(io.BytesIO(b""), "text/html")
    with pytest.raises(ConfigError, match="numbers, texts, lists"):
        serializers.JSONSerializer().serialize(object())
    assert json.loads(serializers.JSONSerializer().serialize([1])) == [1]
