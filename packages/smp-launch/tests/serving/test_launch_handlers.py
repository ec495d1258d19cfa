"""What computes answers, in this process: programs of PyTorch, SavedModels of TensorFlow."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.serving import content
from smdistributed.modelparallel.launch.serving.content import ContentError
from smdistributed.modelparallel.launch.serving.handlers import Request, saved_model, torch_model

pytestmark = pytest.mark.timeout(300)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", [".pt2", ".pt"])
def test_exported_programs_need_no_script(tmp_path: Path, suffix: str) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    file = tmp_path / f"model{suffix}"
    if suffix == ".pt2":
        torch.export.save(torch.export.export(net, (torch.ones(1, 2),)), str(file))
    else:
        torch.jit.save(torch.jit.script(net), str(file))
    handler = torch_model.load(tmp_path, None)
    for kind, body in ((content.JSON, b"[[1, 2]]"), (content.CSV, b"1,2\n")):
        assert json.loads(handler.answer(Request(body, kind)).body) == [[3.0]]
    answer = handler.answer(Request(b"[[1, 2]]", content.JSON, content.NPY))
    assert content.decode(answer.body, answer.content_type).tolist() == [[3.0]]
    file.write_bytes(b"neither")
    with pytest.raises(LaunchError, match=r"is no program of torch\.export or TorchScript"):
        torch_model.load(tmp_path, None)


def test_a_script_may_do_all_of_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "of_all.py"
    script.write_text(
        "def model_fn(folder): return folder\n"
        "def transform_fn(model, body, kind, accept): return body.upper() + kind, 'x/y'\n"
    )
    answer = torch_model.load(tmp_path, script).answer(Request(b"abc", "text/plain"))
    assert (answer.body, answer.content_type) == (b"ABCtext/plain", "x/y")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model with several signatures; the newest adds one."""
    tf = pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("saved")

    class Model(tf.Module):  # type: ignore[misc]
        def __init__(self, added: float) -> None:
            super().__init__()
            self.added = tf.Variable(added)

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
        def add(self, x: Any) -> Any:
            return {"y": x + self.added}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="picture")])
        def length(self, picture: Any) -> Any:
            return {"size": tf.strings.length(picture), "same_bytes": picture}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
        def classify(self, examples: Any) -> Any:
            spec = {"x": tf.io.FixedLenFeature([], tf.float32)}
            x = tf.io.parse_example(examples, spec)["x"]
            classes = tf.tile(tf.constant([["a", "b"]]), [tf.size(x), 1])
            scores = tf.stack([x, 1 - x], 1)
            return {"classes": classes, "scores": scores, "outputs": x[:, None] * 2}

    for version in (2, 10):
        made = Model(float(version))
        signatures = {
            "serving_default": made.add,
            "length": made.length,
            "classify": made.classify,
        }
        tf.saved_model.save(made, str(folder / str(version)), signatures=signatures)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_the_newest_version_answers_in_every_form(saved: Path) -> None:
    handler = saved_model.load(saved, None)

    def ask(body: Any, kind: str = content.JSON, attributes: str = "") -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return json.loads(handler.answer(Request(data, kind, "", attributes)).body)

    added = {"predictions": [[11.0, 12.0]]}
    assert ask({"instances": [[1, 2]]}) == added
    assert ask({"instances": [{"x": [1, 2]}]}) == added
    assert ask([[1, 2]]) == added
    assert ask(b"1,2\n", content.CSV) == added
    assert ask(b"[1, 2]\n", content.JSON_LINES) == added
    assert ask(content.encode(np.array([[1, 2]]), content.NPY), content.NPY) == added
    assert ask({"inputs": [[1, 2]]}) == {"outputs": [[11.0, 12.0]]}
    assert ask({"inputs": {"x": [[1, 2]]}}) == {"outputs": [[11.0, 12.0]]}
    picture = {"b64": base64.b64encode(b"\xff\x00\x01").decode()}
    found = ask({"signature_name": "length", "instances": [{"picture": picture}]})
    assert found == {"predictions": [{"size": 3, "same_bytes": picture}]}
    examples = {"signature_name": "classify", "examples": [{"x": 0.25}, {"x": 1.0}]}
    assert ask(examples, attributes="tfs-method=classify") == {
        "results": [[["a", 0.25], ["b", 0.75]], [["a", 1.0], ["b", 0.0]]]
    }
    assert ask(examples, attributes="tfs-method=regress") == {"results": [0.5, 2.0]}
    for wrong, match in (
        ({"other": 1}, "inputs are x; x is missing"),
        ({"instances": []}, "at least one row"),
        ({"instances": [["a", "b"]]}, "not as its signature says"),
        ({"instances": [[1, 2, 3]]}, r"x has shape \(None, 2\); got \(1, 3\)"),
        ({"instances": [{"x": [1, 2]}, [1, 2]]}, "the same names"),
        ({"signature_name": "none", "instances": [1]}, "must be one of serving_default"),
        ({"inputs": {"z": [[1, 2]]}}, "not as its signature says"),
    ):
        with pytest.raises(ContentError, match=match):
            ask(wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_script_reads_and_writes_around_the_model(saved: Path, tmp_path: Path) -> None:
    script = tmp_path / "inference.py"
    script.write_text(
        "import json\n"
        "def input_handler(data, context):\n"
        "    assert context.request_content_type == 'x/words'\n"
        "    return json.dumps({'instances': [[float(w) for w in data.read().split()]]})\n"
        "def output_handler(response, context):\n"
        "    return str(response.json()['predictions'][0]), context.accept_header\n"
    )
    answer = saved_model.load(saved, script).answer(Request(b"1 2", "x/words", "x/y"))
    assert (answer.body, answer.content_type) == (b"[11.0, 12.0]", "x/y")
    script.write_text("def handler(data, context): pass")
    with pytest.raises(LaunchError, match="must have input_handler and output_handler"):
        saved_model.load(saved, script)
    with pytest.raises(LaunchError, match=r"has a saved_model\.pb; the archive has inference\.py"):
        saved_model.load(tmp_path, None)
