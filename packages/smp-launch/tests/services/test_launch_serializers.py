"""What serializers write, and deserializers read, is what those of the service's SDK do."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest

from smdistributed.modelparallel.launch import deserializers, serializers

with warnings.catch_warnings():
    # Its text has escapes that this Python warns of.
    warnings.simplefilter("ignore")
    from sagemaker import deserializers as judged_readers
    from sagemaker import serializers as judged_writers

DATA = {
    "rows": [[1, 2.5], [3, -4e-7]],
    "row": [1, 2, 3],
    "words": [["a", "b,c"], ['d"e', "f g"]],
    "array": np.arange(6, dtype="float32").reshape(2, 3) / 7,
    "flat": np.arange(3),
    "text": "a,b\n",
    "named": {"instances": [[1.0]], "array": np.arange(2)},
}
WRITERS = {
    "JSONSerializer": ("rows", "row", "words", "array", "flat", "text", "named"),
    "CSVSerializer": ("rows", "row", "words", "array", "flat", "text"),
    "NumpySerializer": ("rows", "row", "array", "flat"),
    "JSONLinesSerializer": ("rows", "row", "text"),
    "StringSerializer": ("text",),
    "IdentitySerializer": ("text",),
}


@pytest.mark.parametrize(
    ("kind", "data"), [(kind, data) for kind, names in WRITERS.items() for data in names]
)
def test_requests_are_equal(kind: str, data: str) -> None:
    ours, theirs = getattr(serializers, kind)(), getattr(judged_writers, kind)()
    assert ours.CONTENT_TYPE == theirs.CONTENT_TYPE
    assert ours.serialize(DATA[data]) == theirs.serialize(DATA[data])


@pytest.mark.parametrize(
    ("kind", "body", "content_type"),
    [
        ("JSONDeserializer", b'{"a": [1, 2.5, null]}', "application/json"),
        ("JSONLinesDeserializer", b'{"a": 1}\n[2]\n', "application/jsonlines"),
        ("CSVDeserializer", b'1,"a,b"\n2,c\n', "text/csv"),
        ("StringDeserializer", "ü".encode(), "text/plain"),
        ("BytesDeserializer", b"\x00\xff", "x/y"),
        ("NumpyDeserializer", b"[[1, 2], [3, 4]]", "application/json"),
        ("NumpyDeserializer", b"1,2\n3,4\n", "text/csv"),
    ],
)
def test_answers_are_equal(kind: str, body: bytes, content_type: str) -> None:
    found: list[Any] = []
    for module in (deserializers, judged_readers):
        reader = getattr(module, kind)()
        found.append(reader.deserialize(io.BytesIO(body), content_type))
    assert np.array_equal(found[0], found[1]) if "Numpy" in kind else found[0] == found[1]
    assert getattr(deserializers, kind)().ACCEPT == getattr(judged_readers, kind)().ACCEPT
