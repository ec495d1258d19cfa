"""The process of an endpoint: ``python -m ... FOLDER [LOCK]``; KServe's server, and two routes.

KServe answers TensorFlow Serving's REST form (``/v1/models/model:predict``). Containers of the
service promise two routes more: ``/ping`` and ``/invocations``. All of it is behind a socket in the
endpoint's folder: a port of the loopback would be open to every user of the machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.launch.request.naming import parse_image
from smdistributed.modelparallel.launch.serving import fetching, handlers, wire
from smdistributed.modelparallel.launch.serving.content import ContentError
from smdistributed.modelparallel.launch.serving.folder import EndpointFolder
from smdistributed.modelparallel.launch.serving.handlers import Answer, Handler, Request

_NAME = "model"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


class _OneByOne:
    """Asks a handler one request after another, in a thread: scripts count on that."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def answer(self, request: Request) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._handler.answer, request)

    async def predict(self, payload: Any) -> dict[str, Any]:
        if not isinstance(payload, dict):
            raise ContentError("a request must be an object of JSON.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._handler.predict, payload)


def serve(folder: EndpointFolder) -> None:
    """Loads the model and answers until somebody leaves word to stop."""
    status = folder.status()
    try:
        container = folder.container()
        os.environ.update(container.environment)
        os.environ["SM_MODEL_DIR"] = str(folder.model)
        framework = parse_image(container.image or "").served_framework or "pytorch"
        run = _prepared(handlers.load(framework, folder.model, fetching.fetch(folder)))
        listening = _listening(folder.socket)
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, SMPError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        folder.write_status(status.turned("Failed", reason))
        return
    threading.Thread(target=_watch, args=(folder,), name="watch", daemon=True).start()
    # Requests that come before the server takes them wait in the socket.
    folder.write_status(status.turned("InService"))
    run(listening)


def _prepared(handler: Handler) -> Any:
    """Returns a function that serves a handler on a socket."""
    import kserve
    from fastapi import Request as HttpRequest
    from fastapi import Response
    from kserve.errors import InvalidInput
    from kserve.model_server import app
    from kserve.protocol.dataplane import DataPlane
    from kserve.protocol.model_repository_extension import ModelRepositoryExtension
    from kserve.protocol.rest.server import RESTServer

    model = _OneByOne(handler)

    class Served(kserve.Model):  # type: ignore[misc]
        async def predict(self, payload: Any, *_: Any, **__: Any) -> dict[str, Any]:
            try:
                return await model.predict(payload)
            except ContentError as error:
                raise InvalidInput(str(error)) from None

    # Without annotations, since these would be names of this function alone.
    async def invocations(request):  # type: ignore[no-untyped-def]
        headers = request.headers
        asked = Request(
            await request.body(),
            headers.get("content-type", "application/octet-stream"),
            headers.get("accept", ""),
            headers.get(_ATTRIBUTES, ""),
        )
        try:
            answer = await model.answer(asked)
        except ContentError as error:
            raise InvalidInput(str(error)) from None
        return Response(answer.body, media_type=answer.content_type)

    async def ping() -> Any:
        return Response(status_code=200)

    invocations.__annotations__ = {"request": HttpRequest}
    app.add_api_route("/invocations", invocations, methods=["POST"], response_model=None)
    app.add_api_route("/ping", ping, methods=["GET"], response_model=None)
    served = Served(_NAME)
    served.load()
    models = kserve.ModelRepository()
    models.update(served)
    server = RESTServer(
        "kserve.model_server:app",
        DataPlane(model_registry=models),
        ModelRepositoryExtension(model_registry=models),
        0,
        grace_period=_GRACE_SECONDS,
        # uvloop takes no sockets of this kind.
        event_loop="asyncio",
    )
    return lambda listening: server.run(sockets=[listening])


def _listening(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with wire.short_name(path) as name:
        listening.bind(name)
    listening.listen(128)
    return listening


def _watch(folder: EndpointFolder) -> None:
    """Ends this process when somebody asks for it."""
    while not folder.is_asked_to_stop:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def main(words: list[str]) -> int:
    """Serves an endpoint, unless another process does."""
    path = Path(words[0])
    # <root>/.serving/endpoints/<name>
    folder = EndpointFolder(path, path.parents[2])
    descriptor = int(words[1]) if len(words) > 1 else folder.lock()
    if descriptor is None:
        print(f"another process serves {path.name}", file=sys.stderr)
        return 1
    os.set_inheritable(descriptor, False)
    serve(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
