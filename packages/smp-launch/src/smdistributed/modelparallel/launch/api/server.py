"""One address of the loopback for the service and its object store, and what points programs at it.

The protocol of the object store is moto's; its data is files.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from smdistributed.modelparallel.launch.api import caller, curves
from smdistributed.modelparallel.launch.api.hosting import Hosting
from smdistributed.modelparallel.launch.api.operations import Operations
from smdistributed.modelparallel.launch.api.signatures import NotSignedError, Request, Secret
from smdistributed.modelparallel.launch.api.store import Store
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.storage.places import (
    FOLDER_STORE_VARIABLE,
    JOBS_VARIABLE,
)

_REGION = "us-east-1"
_OWN = ("sagemaker", "logs")
_INVOCATION = re.compile(r"/endpoints/(?P<name>[^/]+)/invocations")
#: What the service takes at a path of its own.
_NUMBERS = "/BatchPutMetrics"
_STORE_ERROR = "<Error><Code>InvalidRequest</Code><Message>{}</Message></Error>"
#: The SDK asks a fixed address past the endpoint for a bucket's name, and reports its use to
#: another one.
_SDK_CONFIG = """\
SchemaVersion: '1.0'
SageMaker:
  PythonSDK:
    Modules:
      TelemetryOptOut: true
      Session:
        DefaultS3Bucket: {bucket}
"""
#: What would lead elsewhere.
_UNSET = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS")
#: What each Python below this one runs when it starts.
_STARTERS = Path(__file__).parent / "import_path"


class _Door:
    """The application: it checks who asks, and hands the request on."""

    def __init__(self, session: Session, secret: Secret) -> None:
        self._operations = Operations(session)
        self._hosting = Hosting(session)
        self._root = session.root
        self._store = Store(session.root)
        self._secret = secret
        self._others = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = {
            name[5:].replace("_", "-").lower(): text
            for name, text in environ.items()
            if name.startswith("HTTP_")
        }
        for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            if environ.get(name):
                headers[name.replace("_", "-").lower()] = environ[name]
        request = Request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], headers, body)
        try:
            service = self._secret.check(request)
        except NotSignedError as error:
            return _answer(start, 403, {"__type": "AccessDeniedException", "message": str(error)})
        if found := caller.answer(service, body):
            return _send(start, 200, {"Content-Type": "text/xml"}, found)
        if service not in _OWN:
            environ["wsgi.input"] = io.BytesIO(body)
            return self._of_store(environ, start, service, request)
        if asked := _INVOCATION.fullmatch(environ["PATH_INFO"]):
            return _send(start, *self._hosting.invoke(asked["name"], body, headers))
        name = headers.get("x-amz-target", "").partition(".")[2]
        if environ["PATH_INFO"] == _NUMBERS:
            name = _NUMBERS[1:]
        try:
            document = json.loads(body or b"{}")
        except ValueError:
            document = None
        if not isinstance(document, dict):
            return _answer(start, 400, {"__type": "SerializationException"})
        return _answer(start, *self._operations.answer(name, document))

    def _of_store(
        self, environ: dict[str, Any], start: Any, service: str, request: Request
    ) -> Iterable[bytes]:
        is_store = service == "s3"
        if is_store:
            if problem := self._store.problem(request.method, request.target):
                text = _STORE_ERROR.format(html.escape(problem)).encode()
                return _send(start, 400, {"Content-Type": "application/xml"}, text)
            self._store.before(request.target)
        if service == "monitoring":
            curves.bring(self._root, _REGION)
        found: Iterable[bytes] = self._others(environ, start)
        if is_store:
            self._store.after(request.method, request.target)
        return found


#: Does not print each request.
_Quiet = type("_Quiet", (WSGIRequestHandler,), {"log": lambda *_, **__: None})


@contextlib.contextmanager
def serving(session: Session, port: int = 0) -> Iterator[dict[str, str]]:
    """Serves while the body runs. Jobs go on without it, their object store being files.

    Args:
        session: where jobs live.
        port: 0 for a free one.

    Yields:
        the variables that point a program at this server.
    """
    secret = Secret.new()
    server = make_server(
        "127.0.0.1", port, _Door(session, secret), threaded=True, request_handler=_Quiet
    )
    config = session.root / ".api" / f"sdk-{os.getpid()}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(_SDK_CONFIG.format(bucket=session.bucket_name))
    variables = _variables(server.server_port, secret, config, session.root)
    before = dict(os.environ)
    os.environ.update(variables)
    for name in _UNSET:
        os.environ.pop(name, None)
    thread = threading.Thread(target=server.serve_forever, name="api", daemon=True)
    thread.start()
    try:
        yield variables
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        config.unlink(missing_ok=True)
        os.environ.clear()
        os.environ.update(before)


def _variables(port: int, secret: Secret, config: Path, root: Path) -> dict[str, str]:
    url = f"http://127.0.0.1:{port}"
    return {
        "AWS_ENDPOINT_URL": url,
        FOLDER_STORE_VARIABLE: url,
        "AWS_ACCESS_KEY_ID": secret.key,
        "AWS_SECRET_ACCESS_KEY": secret.secret,
        "AWS_DEFAULT_REGION": _REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        JOBS_VARIABLE: str(root),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTERS), os.environ.get("PYTHONPATH")])),
    }


def _answer(start: Any, code: int, document: dict[str, Any]) -> Iterable[bytes]:
    kind = {"Content-Type": "application/x-amz-json-1.1"}
    return _send(start, code, kind, json.dumps(document).encode())


def _send(start: Any, code: int, headers: dict[str, str], data: bytes) -> Iterable[bytes]:
    length = {"Content-Length": str(len(data))}
    start(f"{code} {HTTPStatus(code).phrase}", [*{**headers, **length}.items()])
    return [data]
