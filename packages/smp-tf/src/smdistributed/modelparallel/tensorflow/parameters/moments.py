"""When a variable had a value: what changes variables is counted, and former values are kept.

Only until all processes of a pipeline come together. Until then one may ask for a value that
another one, which is further on in the script, has changed since.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Changes(IntEnum):
    """What a function does to variables that one partition has."""

    NOTHING = 0
    ASSIGNS = 1
    UPDATES = 2  # by an optimizer, in all processes


def note_changes(graph: Any, changes: Changes) -> None:
    """Notes in a graph, and in those around it, what it does to variables."""
    while hasattr(graph, "outer_graph"):
        graph._smp_changes = max(changes, changes_of(graph))
        graph = graph.outer_graph


def changes_of(graph: Any) -> Changes:
    """Returns what a function does to variables that one partition has."""
    return getattr(graph, "_smp_changes", Changes.NOTHING)


class Moments:
    """Counts changes of the variables that one partition each has.

    Attributes:
        now: the same in all processes of a pipeline at one line of the script.
        since: the first moment of which values are known.
    """

    def __init__(self) -> None:
        self.now = 0
        self.since = 0
        self._former: dict[int, list[tuple[int, Any]]] = {}

    def keep(self, number: int, value: Any) -> None:
        """Keeps the value of a variable that is about to be changed; before ``pass_on``."""
        self._former.setdefault(number, []).append((self.now, value))

    def pass_on(self) -> None:
        """Begins another moment."""
        self.now += 1

    def forget(self, at_least: int = 0) -> None:
        """Begins another moment, of which on values are known."""
        self.now = self.since = 1 + max(self.now, at_least)
        self._former.clear()

    def former(self, number: int, moment: int) -> Any:
        """Returns the value that a variable had at a moment; None if it is the present one."""
        kept = self._former.get(number, ())
        return next((value for until, value in kept if moment <= until), None)
