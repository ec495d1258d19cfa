"""Records in a stream: RecordIO, TFRecord, lines of text.

Source: estimator interface, section 5 (reader); the public formats of RecordIO and TFRecord.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_MAGIC = 0xCED7230A
_LENGTH_BITS = 29
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
_ALIGNMENT = 4
#: Parts of a record: a whole one, the first, one between, the last.
_WHOLE, _FIRST, _BETWEEN, _LAST = range(4)


class FramingError(ValueError):
    """A stream is not of the format that it is read as."""


def as_record_io(data: bytes) -> bytes:
    """Returns a record of RecordIO; its length is at most 512 MiB.

    Raises:
        FramingError: it is longer.
    """
    if len(data) > _LENGTH_MASK:
        raise FramingError(f"a record has at most {_LENGTH_MASK} bytes; got {len(data)}")
    padding = b"\0" * (-len(data) % _ALIGNMENT)
    return struct.pack("<II", _MAGIC, len(data)) + data + padding


def record_io(stream: BinaryIO) -> Iterator[bytes]:
    """Yields the records of RecordIO.

    Raises:
        FramingError: it is none, or ends inside of a record.
    """
    parts: list[bytes] = []
    while header := _exactly(stream, 8, may_end=not parts):
        magic, word = struct.unpack("<II", header)
        if magic != _MAGIC:
            raise FramingError(f"RecordIO begins records with {_MAGIC:#x}; got {magic:#x}")
        kind, length = word >> _LENGTH_BITS, word & _LENGTH_MASK
        if (kind in (_BETWEEN, _LAST)) is not bool(parts) or kind > _LAST:
            raise FramingError("parts of a record of RecordIO are not in order")
        parts.append(_exactly(stream, length))
        _exactly(stream, -length % _ALIGNMENT)
        if kind in (_WHOLE, _LAST):
            # Where writers cut a record there was the magic number.
            yield struct.pack("<I", _MAGIC).join(parts)
            parts = []


def tf_record(stream: BinaryIO) -> Iterator[bytes]:
    """Yields the records of TFRecord; their checksums are not looked at.

    Raises:
        FramingError: the stream ends inside of a record.
    """
    while header := _exactly(stream, 12, may_end=True):
        (length,) = struct.unpack("<Q", header[:8])
        yield _exactly(stream, length)
        _exactly(stream, 4)


def text_line(stream: BinaryIO) -> Iterator[bytes]:
    """Yields lines, without their ends."""
    for line in stream:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


FORMATS = {"RecordIO": record_io, "TFRecord": tf_record, "TextLine": text_line}


def _exactly(stream: BinaryIO, size: int, *, may_end: bool = False) -> bytes:
    data = stream.read(size)
    if len(data) < size and (data or not may_end):
        raise FramingError(f"the stream ends inside of a record: {len(data)} of {size} bytes")
    return data
