"""Proof that a message comes from a process of this job.

Objects travel as pickles, and to read a pickle is to run what it says. The launcher gives a secret
to all processes of a job. Each message carries a keyed digest made with it, and nothing is
unpickled before the digest is right.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

#: The variable that holds the secret of a job; smprun makes a new one for each.
SECRET_VARIABLE = "SMP_JOB_SECRET"
_PLAIN, _SEALED = b"\0", b"\1"
_DIGEST_BYTES = 32


class SealError(Exception):
    """A message does not prove that it comes from this job; the text says why."""


class Seal:
    """Seals messages and opens them.

    Args:
        secret: of the job; None where there is none, and then nothing is proved.
    """

    def __init__(self, secret: str | None) -> None:
        # Of any length, unlike the key of a digest.
        self._key = None if not secret else hashlib.blake2b(secret.encode()).digest()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Seal:
        """Returns that of the job which has this environment."""
        return cls(environ.get(SECRET_VARIABLE))

    def close(self, payload: bytes, sender: int, channel: int) -> bytes:
        """Returns a message as it travels.

        Args:
            payload: the message.
            sender: global rank of this process.
            channel: on which it is sent.
        """
        if self._key is None:
            return _PLAIN + payload
        return b"".join((_SEALED, self._digest(payload, sender, channel), payload))

    def open(self, message: bytes | bytearray, sender: int, channel: int) -> memoryview:
        """Returns the payload of what came from a rank.

        Raises:
            SealError: it was not sent by that rank of this job on that channel.
        """
        kind, body = bytes(message[:1]), memoryview(message)[1:]
        if kind == (_PLAIN if self._key is None else _SEALED):
            if self._key is None:
                return body
            digest, payload = bytes(body[:_DIGEST_BYTES]), body[_DIGEST_BYTES:]
            if hmac.compare_digest(digest, self._digest(payload, sender, channel)):
                return payload
            raise SealError(f"made with another {SECRET_VARIABLE}, or changed on its way")
        one = "without" if self._key is not None else "with"
        raise SealError(f"sent {one} a secret in {SECRET_VARIABLE}, unlike those of this process")

    def _digest(self, payload: bytes | memoryview, sender: int, channel: int) -> bytes:
        assert self._key is not None
        place = f"{sender} {channel} ".encode()
        digest = hashlib.blake2b(place, key=self._key, digest_size=_DIGEST_BYTES)
        digest.update(payload)
        return digest.digest()
