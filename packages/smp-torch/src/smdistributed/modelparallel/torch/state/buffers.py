"""What has numbers and no objects in it: arrays of NumPy and of Python, and ``bytearray``."""

from __future__ import annotations

import array
import sys
from typing import Any

_BUFFERS = (bytearray, array.array)


def is_buffer(obj: Any) -> bool:
    """Whether an object is one that can be written to."""
    if isinstance(obj, _BUFFERS):
        return True
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(obj, numpy.ndarray)
        and obj.flags.writeable
        and not obj.dtype.hasobject
    )


def numbers_of(obj: Any) -> tuple[Any, bytes]:
    """Returns what is in a buffer, its shape if it has one: it stays when that is written to."""
    if isinstance(obj, _BUFFERS):
        return None, bytes(obj)
    return obj.shape, obj.tobytes()


def put_numbers(obj: Any, numbers: tuple[Any, bytes]) -> None:
    """Has a buffer contain what ``numbers_of`` has told of another one."""
    shape, content = numbers
    if isinstance(obj, bytearray):
        obj[:] = content
    elif isinstance(obj, array.array):
        del obj[:]
        obj.frombytes(content)
    else:
        if obj.shape != shape:
            obj.resize(shape, refcheck=False)
        obj[...] = sys.modules["numpy"].frombuffer(content, obj.dtype).reshape(shape)
