"""How the answer of an endpoint becomes what ``predict`` returns.

Source: estimator interface, section 7 (predictor); the public interface of the service's SDK.
"""

from __future__ import annotations

import abc
import csv
import io
import json
from typing import Any

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError

__all__ = [
    "BaseDeserializer",
    "BytesDeserializer",
    "CSVDeserializer",
    "JSONDeserializer",
    "JSONLinesDeserializer",
    "NumpyDeserializer",
    "PandasDeserializer",
    "SimpleBaseDeserializer",
    "StreamDeserializer",
    "StringDeserializer",
]


class BaseDeserializer(abc.ABC):
    """What a deserializer can do."""

    @property
    @abc.abstractmethod
    def ACCEPT(self) -> tuple[str, ...]:  # noqa: N802 - the documented name
        """The types of content that it reads."""

    @abc.abstractmethod
    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns what is in an answer, and closes it."""


class SimpleBaseDeserializer(BaseDeserializer):
    """A deserializer whose types of content are given."""

    def __init__(self, accept: str | tuple[str, ...] = "*/*") -> None:
        self.accept = accept

    @property
    def ACCEPT(self) -> tuple[str, ...]:  # noqa: N802 - the documented name
        """The types of content that it reads."""
        return (self.accept,) if isinstance(self.accept, str) else tuple(self.accept)


class StringDeserializer(SimpleBaseDeserializer):
    """Returns a text."""

    def __init__(
        self, encoding: str = "UTF-8", accept: str | tuple[str, ...] = "application/json"
    ) -> None:
        super().__init__(accept)
        self.encoding = encoding

    def deserialize(self, stream: Any, content_type: str) -> str:
        """Returns the text of the answer."""
        return _read(stream).decode(self.encoding)


class BytesDeserializer(SimpleBaseDeserializer):
    """Returns bytes."""

    def deserialize(self, stream: Any, content_type: str) -> bytes:
        """Returns the bytes of the answer."""
        return _read(stream)


class CSVDeserializer(SimpleBaseDeserializer):
    """Returns a list of rows, each a list of texts."""

    def __init__(self, encoding: str = "utf-8", accept: str | tuple[str, ...] = "text/csv") -> None:
        super().__init__(accept)
        self.encoding = encoding

    def deserialize(self, stream: Any, content_type: str) -> list[list[str]]:
        """Returns the rows of the answer."""
        return list(csv.reader(_read(stream).decode(self.encoding).splitlines()))


class StreamDeserializer(SimpleBaseDeserializer):
    """Returns what the answer can be read from, and its type."""

    def deserialize(self, stream: Any, content_type: str) -> tuple[Any, str]:
        """Returns the stream, which is the caller's to close, and the type of content."""
        return stream, content_type


class NumpyDeserializer(SimpleBaseDeserializer):
    """Returns an array; needs NumPy. Reads NumPy's format, JSON and CSV.

    Args:
        dtype: of arrays that are read from JSON or CSV; None for what the numbers say.
        accept: types of content.
        allow_pickle: True is refused: an answer could then run code.
    """

    def __init__(
        self,
        dtype: Any = None,
        accept: str | tuple[str, ...] = "application/x-npy",
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(accept)
        if allow_pickle:
            raise ConfigError(
                "allow_pickle must be False: a pickle in an answer runs code here; leave it out."
            )
        self.dtype = dtype

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns the array of the answer.

        Raises:
            ConfigError: the answer is of another type.
        """
        import numpy as np

        kind, data = _kind(content_type), _read(stream)
        if kind == "application/x-npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
        if kind == "application/json":
            return np.array(json.loads(data), dtype=self.dtype)
        if kind == "text/csv":
            return np.genfromtxt(io.StringIO(data.decode()), delimiter=",", dtype=self.dtype)
        raise _not_readable(self, content_type)


class JSONDeserializer(SimpleBaseDeserializer):
    """Returns what JSON says."""

    def __init__(self, accept: str | tuple[str, ...] = "application/json") -> None:
        super().__init__(accept)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns the value of the answer."""
        return json.loads(_read(stream))


class JSONLinesDeserializer(SimpleBaseDeserializer):
    """Returns a list of what each line of JSON says."""

    def __init__(self, accept: str | tuple[str, ...] = "application/jsonlines") -> None:
        super().__init__(accept)

    def deserialize(self, stream: Any, content_type: str) -> list[Any]:
        """Returns the values of the answer."""
        return [json.loads(line) for line in _read(stream).splitlines() if line.strip()]


class PandasDeserializer(SimpleBaseDeserializer):
    """Returns a table of pandas, from CSV or JSON; needs pandas."""

    def __init__(self, accept: str | tuple[str, ...] = ("text/csv", "application/json")) -> None:
        super().__init__(accept)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns the table of the answer.

        Raises:
            ConfigError: the answer is of another type.
        """
        import pandas

        kind, text = _kind(content_type), io.StringIO(_read(stream).decode())
        if kind == "text/csv":
            return pandas.read_csv(text)
        if kind == "application/json":
            return pandas.read_json(text)
        raise _not_readable(self, content_type)


def _read(stream: Any) -> bytes:
    try:
        return bytes(stream.read())
    finally:
        stream.close()


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _not_readable(reader: BaseDeserializer, content_type: str) -> ConfigError:
    return ConfigError(
        f"{type(reader).__name__} cannot read {describe(content_type)}: give accept, or another "
        "deserializer."
    )
