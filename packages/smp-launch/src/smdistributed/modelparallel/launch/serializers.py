"""How what is given to ``predict`` becomes the body of a request.

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
    "BaseSerializer",
    "CSVSerializer",
    "IdentitySerializer",
    "JSONLinesSerializer",
    "JSONSerializer",
    "NumpySerializer",
    "SimpleBaseSerializer",
    "StringSerializer",
]


class BaseSerializer(abc.ABC):
    """What a serializer can do."""

    @property
    @abc.abstractmethod
    def CONTENT_TYPE(self) -> str:  # noqa: N802 - the documented name
        """The type of content that it writes."""

    @abc.abstractmethod
    def serialize(self, data: Any) -> Any:
        """Returns the body of a request."""


class SimpleBaseSerializer(BaseSerializer):
    """A serializer whose type of content is given."""

    def __init__(self, content_type: str = "application/json") -> None:
        if not isinstance(content_type, str):
            raise ConfigError(
                f"content_type must be a text such as 'text/csv'; got {describe(content_type)}: "
                "to change a class give an instance, JSONSerializer()."
            )
        self.content_type = content_type

    @property
    def CONTENT_TYPE(self) -> str:  # noqa: N802 - the documented name
        """The type of content that it writes."""
        return self.content_type


class JSONSerializer(SimpleBaseSerializer):
    """Writes JSON: dictionaries, lists, arrays, tensors; what can be read is read."""

    def serialize(self, data: Any) -> Any:
        """Returns the text of the request."""
        if hasattr(data, "read"):
            return data.read()
        return json.dumps(data, default=_plain)


class JSONLinesSerializer(SimpleBaseSerializer):
    """Writes a line of JSON for each element; a text stays as it is."""

    def __init__(self, content_type: str = "application/jsonlines") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns the text of the request.

        Raises:
            ConfigError: it is neither a text, nor a list, nor a file.
        """
        if isinstance(data, str):
            return data
        if hasattr(data, "read"):
            return data.read()
        if hasattr(data, "__iter__"):
            return "\n".join(json.dumps(each, default=_plain) for each in data)
        raise ConfigError(f"lines of JSON are a text, a list or a file; got {describe(data)}.")


class CSVSerializer(SimpleBaseSerializer):
    """Writes rows with commas: a list of rows, a row, an array, a text or a file."""

    def __init__(self, content_type: str = "text/csv") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns the text of the request.

        Raises:
            ConfigError: there is nothing in it.
        """
        if hasattr(data, "read"):
            return data.read()
        if hasattr(data, "to_csv"):
            return data.to_csv(header=False, index=False)
        if isinstance(data, str):
            return data
        if hasattr(data, "detach"):
            data = data.detach().cpu().numpy()
        rows = data if len(data) and _is_row(data[0]) else [data]
        if not len(data) or any(not len(row) for row in rows):
            raise ConfigError("there is nothing to write as CSV: give at least one number.")
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(list, rows))
        return text.getvalue().removesuffix("\n")


class NumpySerializer(SimpleBaseSerializer):
    """Writes an array in NumPy's format; needs NumPy.

    Args:
        dtype: of the array; None for that of the data.
        content_type: of the request.
    """

    def __init__(self, dtype: Any = None, content_type: str = "application/x-npy") -> None:
        super().__init__(content_type)
        self.dtype = dtype

    def serialize(self, data: Any) -> bytes:
        """Returns the bytes of the request.

        Raises:
            ConfigError: there is nothing in it.
        """
        import numpy as np

        if hasattr(data, "read"):
            return bytes(data.read())
        if hasattr(data, "detach"):
            data = data.detach().cpu().numpy()
        array = np.asarray(data, dtype=self.dtype)
        if not array.size:
            raise ConfigError("there is nothing to write as an array: give at least one number.")
        stream = io.BytesIO()
        np.save(stream, array, allow_pickle=False)
        return stream.getvalue()


class StringSerializer(SimpleBaseSerializer):
    """Writes a text."""

    def __init__(self, content_type: str = "text/plain") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> bytes:
        """Returns the bytes of the text, or of the file.

        Raises:
            ConfigError: it is no text.
        """
        if isinstance(data, str):
            return data.encode("utf-8")
        if isinstance(data, bytes):
            return data
        if hasattr(data, "read"):
            found = data.read()
            return found.encode("utf-8") if isinstance(found, str) else bytes(found)
        raise ConfigError(f"StringSerializer writes a text; got {describe(data)}.")


class IdentitySerializer(SimpleBaseSerializer):
    """Writes bytes, or a text, as they are."""

    def __init__(self, content_type: str = "application/octet-stream") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns what is given."""
        return data


def _plain(value: Any) -> Any:
    """Returns an array or a tensor as lists."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ConfigError(
        f"a request has numbers, texts, lists and dictionaries; got {describe(value)}."
    )


def _is_row(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes))
