"""Arrays as the formats of requests and answers: JSON, lines of JSON, CSV, NumPy's."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

JSON = "application/json"
JSON_LINES = "application/jsonlines"
CSV = "text/csv"
NPY = "application/x-npy"
#: Those whose bytes are text, which scripts get as such.
TEXT = (JSON, JSON_LINES, CSV, "text/plain")
_OTHER_NAMES = {"application/jsons": JSON_LINES, "application/csv": CSV}


class ContentError(ValueError):
    """A request cannot be read, or nobody can write what it accepts."""


def kind_of(header: str) -> str:
    """Returns the type of content that a header names, without its parameters."""
    word = header.partition(";")[0].strip().lower()
    return _OTHER_NAMES.get(word, word)


def accepted(header: str) -> str:
    """Returns the first type that an ``Accept`` header names and that can be written.

    Raises:
        ContentError: there is none.
    """
    for word in header.split(","):
        kind = kind_of(word)
        if kind in (JSON, JSON_LINES, CSV, NPY):
            return kind
        if kind in ("", "*/*", "application/*"):
            return JSON
    raise ContentError(f"answers are {JSON}, {JSON_LINES}, {CSV} or {NPY}; accepted is {header!r}.")


def decode(body: bytes, kind: str) -> Any:
    """Returns the lists of numbers and words, or the array, in a body.

    Raises:
        ContentError: it is not of this type, or nobody can read the type.
    """
    try:
        if kind == JSON:
            return json.loads(body)
        if kind == JSON_LINES:
            return [json.loads(line) for line in body.splitlines() if line.strip()]
        if kind == CSV:
            return [[_number(cell) for cell in row] for row in _rows(body) if row]
        if kind == NPY:
            import numpy as np

            return np.load(io.BytesIO(body), allow_pickle=False)
    except ValueError as error:
        raise ContentError(f"the request is no {kind}: {error}.") from None
    raise ContentError(
        f"requests are {JSON}, {JSON_LINES}, {CSV} or {NPY}; got {kind!r}: give one of them, or a "
        "script with input_fn."
    )


def encode(value: Any, kind: str) -> bytes:
    """Returns lists, or an array, in a type that ``accepted`` returned."""
    if kind == NPY:
        import numpy as np

        stream = io.BytesIO()
        np.save(stream, np.asarray(value), allow_pickle=False)
        return stream.getvalue()
    plain = value.tolist() if hasattr(value, "tolist") else value
    if kind == JSON:
        return json.dumps(plain).encode()
    rows = plain if isinstance(plain, list) else [plain]
    if kind == JSON_LINES:
        return "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(row if isinstance(row, list) else [row] for row in rows)
    return text.getvalue().encode()


def _rows(body: bytes) -> Any:
    return csv.reader(io.StringIO(body.decode(), newline=""))


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
