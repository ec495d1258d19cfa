"""What this package needs of boto3, which may not be installed.

Source: the public interface of the service's SDK.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from smdistributed.modelparallel.common.errors import UnsupportedError

#: Where nobody names one; the service of the loopback says the same.
_REGION = "us-east-1"


def region() -> str:
    """Returns the region that programs are told, or the one there is."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _REGION


def session(region_name: str) -> Any:
    """Returns a session of boto3; one without clients where it is not installed."""
    try:
        import boto3
    except ImportError:
        return _WithoutBoto(region_name)
    return boto3.session.Session(region_name=region_name)


class _WithoutBoto:
    """Knows its region, and says what is missing where more is asked of it."""

    def __init__(self, region_name: str) -> None:
        self.region_name = region_name

    def client(self, name: str, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            f"clients of {name} need boto3, which is not installed: pip install boto3."
        )

    resource = client
