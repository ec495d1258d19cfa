"""Cases: the bodies that a module of tests offers, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_PREFIX = "case_"


def cases_of(names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the functions ``case_...`` of a module's ``globals()``, by the rest of their names.

    Each is a body for ``Worlds.run``.
    """
    return {
        name.removeprefix(_PREFIX): value
        for name, value in names.items()
        if name.startswith(_PREFIX) and callable(value)
    }
