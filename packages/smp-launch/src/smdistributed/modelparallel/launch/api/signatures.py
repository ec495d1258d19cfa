"""Signatures of requests, version 4: a port of the loopback that starts programs is no open door.

Every user of a machine reaches its loopback. So each server makes a secret of its own, and answers
nothing that is not signed with it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from calendar import timegm
from collections.abc import Mapping
from dataclasses import dataclass

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<date>\d{8})/(?P<region>[\w-]+)/"
    r"(?P<service>[\w-]+)/aws4_request, ?SignedHeaders=(?P<headers>[\w;.-]+), ?"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)
_MOST_SECONDS = 900
_HASH = re.compile(r"[0-9a-f]{64}")
#: Else a request could be sent again with another body, elsewhere, or later.
_NEEDED = {"host", "x-amz-date"}


class NotSignedError(Exception):
    """A request is not signed by who knows the secret."""


@dataclass(frozen=True)
class Request:
    """A request as it came.

    Attributes:
        method: such as POST.
        target: path and query, as they were sent.
        headers: by their names in small letters.
        body: of the request.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Secret:
    """A key and its secret."""

    key: str
    secret: str

    @classmethod
    def new(cls) -> Secret:
        """Returns one that nobody knows."""
        return cls(f"SMP{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))

    def check(self, request: Request) -> str:
        """Checks a signature; returns the service that the request is for.

        Raises:
            NotSignedError: there is none, or it is not right.
        """
        given = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if given is None or not hmac.compare_digest(given["key"], self.key):
            raise NotSignedError("the request is not signed with the key of this server")
        names = set(given["headers"].split(";"))
        if not names >= _NEEDED or not names <= set(request.headers):
            raise NotSignedError("the signature does not cover the host and the date")
        _check_time(request.headers["x-amz-date"], given["date"])
        _check_body(request)
        kind = S3SigV4Auth if given["service"] == "s3" else SigV4Auth
        auth = kind(Credentials(self.key, self.secret), given["service"], given["region"])
        signed = AWSRequest(
            request.method,
            f"http://{request.headers['host']}{request.target}",
            headers={name: request.headers[name] for name in names},
            data=request.body,
        )
        signed.context["timestamp"] = request.headers["x-amz-date"]
        text = auth.string_to_sign(signed, auth.canonical_request(signed))
        if not hmac.compare_digest(auth.signature(text, signed), given["signature"]):
            raise NotSignedError("the signature is not right")
        return given["service"]


def _check_time(stamp: str, date: str) -> None:
    try:
        sent = timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        raise NotSignedError("the date of the request cannot be read") from None
    if not stamp.startswith(date) or abs(time.time() - sent) > _MOST_SECONDS:
        raise NotSignedError("the request is not of this quarter of an hour")


def _check_body(request: Request) -> None:
    """Checks the body where its hash is what was signed; else it is hashed for the signature."""
    given = request.headers.get("x-amz-content-sha256", "")
    if _HASH.fullmatch(given) and hashlib.sha256(request.body).hexdigest() != given:
        raise NotSignedError("the body is not the one that was signed")
