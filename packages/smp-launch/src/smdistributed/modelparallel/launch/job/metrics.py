"""Numbers in the log of a job, found by the regular expressions of ``metric_definitions``.

Source: estimator interface, section 1 (metrics).
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.request.document import Metric

Record = Mapping[str, Any]
Compiled = list[tuple[str, re.Pattern[str]]]


def compiled(definitions: Iterable[Metric]) -> Compiled:
    """Compiles the expressions; one without a group for the number warns, and gives none.

    Published notebooks have such a metric.

    Raises:
        ConfigError: one is not well formed.
    """
    found = []
    for definition in definitions:
        try:
            pattern = re.compile(definition.regex)
        except re.error as error:
            raise ConfigError(
                f"metric {definition.name}: {definition.regex!r} is no regular expression: {error}."
            ) from None
        if pattern.groups < 1:
            warnings.warn(
                f"metric {definition.name} gives no number, since its expression has no group for "
                f"one; got {definition.regex!r}: write it as 'loss: ([0-9.]+)'.",
                stacklevel=2,
            )
            continue
        found.append((definition.name, pattern))
    return found


class Recorder:
    """Writes the numbers of each line to a file; keeps the last of each name."""

    def __init__(self, definitions: Iterable[Metric], file: Path) -> None:
        self._patterns = compiled(definitions)
        self._file = file
        self._last: dict[str, dict[str, Any]] = {}

    def look_at(self, line: str) -> None:
        """Records the numbers of a line."""
        for name, pattern in self._patterns:
            found = pattern.search(line)
            number = _number(found[1]) if found else None
            if number is not None:
                record = {"MetricName": name, "Value": number, "Timestamp": time.time()}
                self._last[name] = record
                write(self._file, [record])

    @property
    def final(self) -> tuple[dict[str, Any], ...]:
        """The last number of each name."""
        return tuple(self._last.values())


def write(file: Path, records: Iterable[Record]) -> None:
    """Adds records to what a file has, all at once."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in records))


def read(file: Path) -> Iterator[Record]:
    """Yields the records of a file, the oldest first."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
