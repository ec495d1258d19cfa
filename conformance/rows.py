"""The rows of the specification."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("rows.yaml")


@dataclass(frozen=True)
class Row:
    """Something documented: a name, a parameter, a rule, or a use in published scripts.

    Attributes:
        id: what reports call it.
        frameworks: whose users were promised it.
        source: the document and its section.
        signature: as printed there, or None.
        without_effect: why it changes nothing here, where it is accepted and no more; else "".
    """

    id: str
    frameworks: tuple[str, ...]
    source: str
    signature: str | None = None
    without_effect: str = ""


def load(framework: str) -> dict[str, Row]:
    """Returns the rows that concern a framework, by id."""
    entries: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    rows: dict[str, Row] = {}
    for entry in entries:
        row = Row(**{**entry, "frameworks": tuple(entry["frameworks"])})
        if framework not in row.frameworks:
            continue
        if row.id in rows:
            raise ValueError(f"{FILE.name} has row {row.id} twice for {framework}: merge them.")
        rows[row.id] = row
    return rows


def everything() -> set[str]:
    """Returns the ids of all rows of all frameworks."""
    entries: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {entry["id"] for entry in entries}
