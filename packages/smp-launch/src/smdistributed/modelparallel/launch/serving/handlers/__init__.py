"""What computes the answers of an endpoint: one module for each framework."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smdistributed.modelparallel.launch.serving.content import JSON


@dataclass(frozen=True)
class Request:
    """A request as it came.

    Attributes:
        body: of the request.
        content_type: its header.
        accept: its header; empty for anything.
        attributes: ``CustomAttributes`` of the service: words with commas between them.
    """

    body: bytes
    content_type: str = JSON
    accept: str = ""
    attributes: str = ""


@dataclass(frozen=True)
class Answer:
    """What goes back."""

    body: bytes
    content_type: str


class Handler(Protocol):
    """A model that is loaded."""

    def answer(self, request: Request) -> Answer:
        """Answers a request.

        Raises:
            ContentError: the request is at fault.
        """

    def predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answers TensorFlow Serving's REST form: ``instances`` become ``predictions``.

        Raises:
            ContentError: the request is at fault.
        """


def load(framework: str, model: Path, script: Path | None) -> Handler:
    """Loads the model in a folder, for a framework.

    Raises:
        LaunchError: there is none that can be loaded.
    """
    if framework == "tensorflow":
        from smdistributed.modelparallel.launch.serving.handlers import saved_model

        return saved_model.load(model, script)
    from smdistributed.modelparallel.launch.serving.handlers import torch_model

    return torch_model.load(model, script)


def as_json(value: Any) -> Answer:
    """Returns an answer in JSON."""
    return Answer(json.dumps(value).encode(), JSON)
