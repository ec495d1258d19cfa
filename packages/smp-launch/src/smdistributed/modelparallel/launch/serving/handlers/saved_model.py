"""SavedModels of TensorFlow, behind TensorFlow Serving's REST form.

Source: estimator interface, section 7; the public REST interface of TensorFlow Serving (predict,
classify, regress), and of the service's containers of it (lists, CSV, lines of JSON, and the
functions ``input_handler`` and ``output_handler`` of an ``inference.py``).
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.serving import content
from smdistributed.modelparallel.launch.serving.content import ContentError
from smdistributed.modelparallel.launch.serving.fetching import functions
from smdistributed.modelparallel.launch.serving.handlers import Answer, Request, as_json

_NAMES = ("input_handler", "output_handler", "handler")
_DEFAULT_SIGNATURE = "serving_default"
_METHODS = ("predict", "classify", "regress")
#: Outputs whose names end so are bytes, and written as base64.
_BYTES = "_bytes"


class SavedModel:
    """A model with its signatures."""

    def __init__(self, model: Any, script: ModuleType | None) -> None:
        self._signatures = model.signatures
        # The variables live as long as this object.
        self._model = model
        self._script = script

    def answer(self, request: Request) -> Answer:
        """Answers a request: TensorFlow Serving's form, or plain lists of instances."""
        words = dict(word.strip().partition("=")[::2] for word in request.attributes.split(","))
        method = words.get("tfs-method", "predict")
        if method not in _METHODS:
            raise ContentError(f"tfs-method must be one of {', '.join(_METHODS)}; got {method!r}.")
        context = SimpleNamespace(
            model_name=words.get("tfs-model-name", "model"),
            model_version=words.get("tfs-model-version"),
            method=method,
            request_content_type=request.content_type,
            accept_header=request.accept or content.JSON,
            custom_attributes=request.attributes,
            content_length=len(request.body),
        )
        found = getattr(self, method)(self._payload(request, context))
        if self._script is not None and hasattr(self._script, "output_handler"):
            reply = SimpleNamespace(
                content=json.dumps(found).encode(), text=json.dumps(found), status_code=200
            )
            reply.json = lambda: found
            written, content_type = self._script.output_handler(reply, context)
            data = written.encode() if isinstance(written, str) else bytes(written)
            return Answer(data, content_type)
        return as_json(found)

    def _payload(self, request: Request, context: Any) -> dict[str, Any]:
        if self._script is not None and hasattr(self._script, "input_handler"):
            found = json.loads(self._script.input_handler(io.BytesIO(request.body), context))
        else:
            kind = content.kind_of(request.content_type)
            found = content.decode(request.body, kind)
            if kind == content.NPY:
                found = found.tolist()
        return found if isinstance(found, dict) and _is_form(found) else {"instances": _many(found)}

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answers ``instances``, a list of rows, or ``inputs``, columns by name."""
        signature = self._signature(payload)
        specs = signature.structured_input_signature[1]
        if "instances" in payload:
            outputs = self._run(signature, _columns(payload["instances"], specs))
            return {"predictions": _rows(outputs)}
        if "inputs" in payload:
            given = payload["inputs"]
            named = isinstance(given, dict) and set(given) <= set(specs)
            outputs = self._run(signature, given if named else {_only(specs): given})
            values = {name: _plain(name, each) for name, each in outputs.items()}
            return {"outputs": next(iter(values.values())) if len(values) == 1 else values}
        raise ContentError('a request must have "instances" or "inputs"; this one has neither.')

    def classify(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answers ``examples``, each a dictionary of features, with labels and their scores."""
        outputs = self._of_examples(payload)
        if not {"classes", "scores"} <= set(outputs):
            raise ContentError(f"classify needs outputs classes and scores; got {list(outputs)}.")
        classes = _plain("classes", outputs["classes"])
        scores = _plain("scores", outputs["scores"])
        pairs = zip(classes, scores, strict=True)
        return {"results": [[list(each) for each in zip(*row, strict=True)] for row in pairs]}

    def regress(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answers ``examples`` with a number each."""
        outputs = self._of_examples(payload)
        if "outputs" not in outputs:
            raise ContentError(f"regress needs an output named outputs; got {list(outputs)}.")
        return {"results": outputs["outputs"].numpy().reshape(-1).tolist()}

    def _of_examples(self, payload: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        if not isinstance(payload.get("examples"), list):
            raise ContentError('a request must have "examples", a list of features by name.')
        signature = self._signature(payload)
        common = payload.get("context", {})
        written = [_example(tf, {**common, **each}) for each in payload["examples"]]
        name = _only(signature.structured_input_signature[1])
        found: dict[str, Any] = signature(**{name: tf.constant(written)})
        return found

    def _signature(self, payload: dict[str, Any]) -> Any:
        name = payload.get("signature_name") or _DEFAULT_SIGNATURE
        if name not in self._signatures:
            known = ", ".join(self._signatures) or "none"
            raise ContentError(f"signature_name must be one of {known}; got {name!r}.")
        return self._signatures[name]

    def _run(self, signature: Any, columns: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        specs = signature.structured_input_signature[1]
        if missing := [name for name in specs if name not in columns]:
            raise ContentError(f"inputs are {', '.join(specs)}; {', '.join(missing)} is missing.")
        try:
            tensors = {
                name: tf.constant(_decoded(columns[name]), dtype=spec.dtype)
                for name, spec in specs.items()
            }
        except (ValueError, TypeError) as error:
            raise ContentError(f"an input is not as its signature says: {error}.") from None
        for name, spec in specs.items():
            # Functions of SavedModels take other shapes, and give numbers of no meaning.
            if not spec.shape.is_compatible_with(tensors[name].shape):
                raise ContentError(
                    f"input {name} has shape {spec.shape}; got {tensors[name].shape}."
                )
        try:
            found: dict[str, Any] = signature(**tensors)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ContentError(str(error).partition("\n")[0]) from None
        return found


def load(folder: Path, script: Path | None) -> SavedModel:
    """Loads the newest version in a folder.

    Raises:
        LaunchError: there is no SavedModel.
    """
    import tensorflow as tf

    found = sorted(folder.rglob("saved_model.pb"), key=_version)
    if not found:
        names = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise LaunchError(
            f"a model that is served has a saved_model.pb; the archive has {names}: write one into "
            "SM_MODEL_DIR, by model.export(path) or tf.saved_model.save."
        )
    module = functions(script, _NAMES)
    if module is not None and hasattr(module, "handler"):
        raise LaunchError(
            "inference.py must have input_handler and output_handler; got handler, which asks a "
            "server of TensorFlow Serving itself: divide it into these two."
        )
    return SavedModel(tf.saved_model.load(str(found[-1].parent)), module)


def _version(file: Path) -> tuple[int, str]:
    """Orders by the number that names the folder; those without one come first."""
    name = file.parent.name
    return (int(name) if name.isdecimal() else -1, str(file))


def _is_form(found: dict[str, Any]) -> bool:
    return bool({"instances", "inputs", "examples"} & set(found))


def _many(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _only(specs: dict[str, Any]) -> str:
    if len(specs) != 1:
        raise ContentError(f"inputs are {', '.join(specs)}: give each by its name.")
    return next(iter(specs))


def _columns(rows: Any, specs: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise ContentError('"instances" must be a list with at least one row.')
    if isinstance(rows[0], dict) and not _is_bytes(rows[0]):
        if any(not isinstance(row, dict) or set(row) != set(rows[0]) for row in rows):
            raise ContentError("all instances must have the same names.")
        return {name: [row[name] for row in rows] for name in rows[0]}
    return {_only(specs): rows}


def _rows(outputs: dict[str, Any]) -> list[Any]:
    plain = {name: _plain(name, each) for name, each in outputs.items()}
    if len(plain) == 1:
        return list(next(iter(plain.values())))
    rows = zip(*plain.values(), strict=True)
    return [dict(zip(plain, row, strict=True)) for row in rows]


def _plain(name: str, tensor: Any) -> Any:
    """Returns a tensor as lists; bytes are text, or base64 where the name says so."""

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(each) for each in value]
        if not isinstance(value, bytes):
            return value
        if name.endswith(_BYTES):
            return {"b64": base64.b64encode(value).decode()}
        return value.decode(errors="replace")

    return written(tensor.numpy().tolist())


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"}


def _decoded(value: Any) -> Any:
    if _is_bytes(value):
        return base64.b64decode(value["b64"])
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _example(tf: Any, features: dict[str, Any]) -> bytes:
    written = {}
    for name, value in features.items():
        values = [_decoded(each) for each in _many(value)]
        if all(isinstance(each, int) for each in values):
            written[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        elif all(isinstance(each, (int, float)) for each in values):
            written[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            words = [each if isinstance(each, bytes) else str(each).encode() for each in values]
            written[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=words))
    example = tf.train.Example(features=tf.train.Features(feature=written))
    return bytes(example.SerializeToString())
