"""Requests to an endpoint, over a socket in its folder: no other user of the machine reaches it."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered.

    Attributes:
        status: of HTTP.
        content_type: of the body.
        body: as it came.
    """

    status: int
    content_type: str
    body: bytes


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        with short_name(self._path) as name:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(name)


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yields a name for a socket: the kernel takes none that is longer than 107 bytes."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def ask(
    path: Path, target: str, body: bytes, headers: Mapping[str, str], timeout_seconds: float
) -> Reply:
    """Sends a POST request; returns the answer.

    Raises:
        OSError: nobody answers.
    """
    connection = _Connection(path, timeout_seconds)
    try:
        connection.request("POST", target, body, dict(headers))
        reply = connection.getresponse()
        content_type = reply.getheader("content-type", "application/octet-stream")
        return Reply(reply.status, content_type, reply.read())
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
