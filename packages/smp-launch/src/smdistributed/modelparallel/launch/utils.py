"""Names with the time in them, by the names that notebooks have for what makes them.

Source: the public interface of the service's SDK.
"""

from __future__ import annotations

import secrets
import time

from smdistributed.modelparallel.launch.request import naming

__all__ = [
    "base_from_name",
    "base_name_from_image",
    "name_from_base",
    "name_from_image",
    "sagemaker_short_timestamp",
    "sagemaker_timestamp",
    "unique_name_from_base",
]


def sagemaker_timestamp() -> str:
    """Returns the time in milliseconds, such as ``2026-01-31-12-00-00-123``."""
    return naming.timestamp(time.time())


def sagemaker_short_timestamp() -> str:
    """Returns the time in minutes, such as ``260131-1200``."""
    return time.strftime(naming.SHORT_STAMP, time.gmtime())


def name_from_base(base: str, max_length: int = naming.MOST_LETTERS, short: bool = False) -> str:
    """Returns a name that begins so, as far as there is room, and ends with the time."""
    return _ending_with(
        sagemaker_short_timestamp() if short else sagemaker_timestamp(), base, max_length
    )


def unique_name_from_base(base: str, max_length: int = naming.MOST_LETTERS) -> str:
    """Returns a name that begins so and that nothing else has."""
    return _ending_with(f"{int(time.time())}-{secrets.token_hex(2)}", base, max_length)


def name_from_image(image: str, max_length: int = naming.MOST_LETTERS) -> str:
    """Returns a name that begins as the image's and ends with the time."""
    return name_from_base(base_name_from_image(image), max_length)


def base_name_from_image(image: str) -> str:
    """Returns the name of an image without what is before and behind it."""
    return naming.parse_image(image).repository


def base_from_name(name: str) -> str:
    """Returns what a name begins with that ends with the time."""
    return naming.base_of(name)


def _ending_with(end: str, base: str, max_length: int) -> str:
    return f"{base[: max_length - len(end) - 1]}-{end}"
