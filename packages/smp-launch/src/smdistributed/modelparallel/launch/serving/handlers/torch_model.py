"""Models of PyTorch: the four functions of a script, or their defaults.

Source: estimator interface, section 7; the public interface of the service's PyTorch containers
(``model_fn``, ``input_fn``, ``predict_fn``, ``output_fn``, ``transform_fn``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.serving import content
from smdistributed.modelparallel.launch.serving.content import ContentError
from smdistributed.modelparallel.launch.serving.fetching import functions
from smdistributed.modelparallel.launch.serving.handlers import Answer, Request

_NAMES = ("model_fn", "input_fn", "predict_fn", "output_fn", "transform_fn")
_SUFFIXES = (".pt", ".pth", ".pt2")


class TorchModel:
    """A model and the functions around it."""

    def __init__(self, model: Any, script: ModuleType | None) -> None:
        self._model = model
        self._transform: Callable[..., Any] | None = getattr(script, "transform_fn", None)
        self._input: Callable[..., Any] = getattr(script, "input_fn", _input)
        self._predict: Callable[..., Any] = getattr(script, "predict_fn", _predict)
        self._output: Callable[..., Any] = getattr(script, "output_fn", _output)

    def answer(self, request: Request) -> Answer:
        """Answers a request by the functions of the script."""
        kind = content.kind_of(request.content_type)
        body: bytes | str = request.body
        if kind in content.TEXT:
            body = request.body.decode(errors="replace")
        accept = request.accept or content.JSON
        if self._transform is not None:
            found = self._transform(self._model, body, kind, accept)
        else:
            found = self._output(self._predict(self._input(body, kind), self._model), accept)
        written, content_type = found if isinstance(found, tuple) else (found, accept)
        data = written.encode() if isinstance(written, str) else bytes(written)
        return Answer(data, content_type)

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answers TensorFlow Serving's REST form."""
        if "instances" not in payload:
            raise ContentError('a request must have "instances"; this one has none.')
        body = json.dumps(payload["instances"]).encode()
        answer = self.answer(Request(body, content.JSON, content.JSON))
        return {"predictions": json.loads(answer.body)}


def load(folder: Path, script: Path | None) -> TorchModel:
    """Loads the model in a folder: by ``model_fn``, else as a program that PyTorch exported.

    Raises:
        LaunchError: there is no such function, and nothing that can be loaded without.
    """
    module = functions(script, _NAMES)
    if module is not None and hasattr(module, "model_fn"):
        return TorchModel(module.model_fn(str(folder)), module)
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]
    if len(files) != 1:
        names = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise LaunchError(
            f"without model_fn(model_dir) a model is one file, {', '.join(_SUFFIXES)}; the archive "
            f"has {names}: define model_fn, and give its file as entry_point."
        )
    return TorchModel(_exported(files[0]), module)


def _exported(file: Path) -> Any:
    import torch

    try:
        if file.suffix == ".pt2":
            return torch.export.load(str(file)).module()
        load: Any = torch.jit.load
        return load(str(file), map_location=_device()).eval()
    except Exception as error:  # of many kinds, by the way in which a file is no program
        raise LaunchError(
            f"{file.name} is no program of torch.export or TorchScript ({_line(error)}): define "
            "model_fn(model_dir), which makes the model and loads its state, and give its file as "
            "entry_point."
        ) from None


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _input(body: bytes | str, kind: str) -> Any:
    import torch

    data = body.encode() if isinstance(body, str) else body
    found = content.decode(data, kind)
    if kind == content.NPY:
        return torch.from_numpy(found)
    try:
        return torch.tensor(found, dtype=torch.float32)
    except (ValueError, TypeError) as error:
        raise ContentError(f"without input_fn a request has numbers alone: {error}.") from None


def _predict(data: Any, model: Any) -> Any:
    import torch

    device = next((each.device for each in model.parameters()), _device())
    with torch.no_grad():
        return model(data.to(device))


def _output(prediction: Any, accept: str) -> tuple[bytes, str]:
    kind = content.accepted(accept)
    if hasattr(prediction, "detach"):
        prediction = prediction.detach().cpu().numpy()
    return content.encode(prediction, kind), kind
