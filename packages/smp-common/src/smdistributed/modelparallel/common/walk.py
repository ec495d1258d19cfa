"""Walks through nested data: what is in the place of its leaves, and what it consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.common.errors import UnsupportedError

#: What takes the place of a leaf, with that label, in an argument with that axis.
Part = Callable[[Any, str, int], Any]


class Walk:
    """Replaces leaves.

    Args:
        is_leaf: tells leaves from what is taken apart or stays as it is.
        take_apart: gives the parts of a container, None for everything else.
        part: what takes the place of a leaf.
    """

    def __init__(
        self,
        is_leaf: Callable[[Any], bool],
        take_apart: Callable[[Any], Container | None],
        part: Part,
    ) -> None:
        self._is_leaf = is_leaf
        self._take_apart = take_apart
        self._part = part
        self._above: set[int] = set()
        self._leads_back: dict[int, str] = {}

    def replace(self, value: Any, label: str, axis: int) -> Any:
        """Returns ``value`` with every leaf in it replaced; itself where nothing changes.

        Raises:
            UnsupportedError: a container with leaves leads to itself, or cannot be copied.
        """
        if self._is_leaf(value):
            return self._part(value, label, axis)
        parts = self._take_apart(value)
        if parts is None:
            self._note_other(value, label, axis)
            return value
        if id(value) in self._above:
            self._leads_back[id(value)] = label
            return value
        self._above.add(id(value))
        new = self._replaced(value, parts, label, axis)
        self._above.discard(id(value))
        if all(new[key] is item for key, item in parts.items.items()):
            return value
        if id(value) in self._leads_back:
            where = self._leads_back[id(value)]
            raise UnsupportedError(
                f"{label} leads to itself, at {where}, so that no part can be made of it: give it "
                "smp_slice, or name the argument in non_split_inputs."
            )
        return parts.build(new)

    def _replaced(self, value: Any, parts: Container, label: str, axis: int) -> dict[Any, Any]:
        """Returns the items of a container with their leaves replaced."""
        form = "{}.{}" if parts.kind == "fields" else "{}[{!r}]"
        return {
            key: self.replace(item, form.format(label, key), axis)
            for key, item in parts.items.items()
        }

    def _note_other(self, value: Any, label: str, axis: int) -> None:
        """Takes note of what is neither a leaf nor taken apart."""


class Survey(Walk):
    """Finds out what nested data consists of; see ``Walk``.

    Attributes:
        lists: label and length of lists and tuples of containers, each with leaves in it.
        others: label, and axis, of what is neither a leaf nor taken apart.
    """

    def __init__(
        self,
        is_leaf: Callable[[Any], bool],
        take_apart: Callable[[Any], Container | None],
        part: Part,
    ) -> None:
        super().__init__(is_leaf, take_apart, part)
        self.lists: dict[str, int] = {}
        self.others: dict[str, tuple[Any, int]] = {}
        self._num_leaves = 0

    def replace(self, value: Any, label: str, axis: int) -> Any:
        """Returns what ``Walk`` does."""
        self._num_leaves += self._is_leaf(value)
        return super().replace(value, label, axis)

    def _replaced(self, value: Any, parts: Container, label: str, axis: int) -> dict[Any, Any]:
        new, counts = {}, []
        form = "{}.{}" if parts.kind == "fields" else "{}[{!r}]"
        for key, item in parts.items.items():
            before = self._num_leaves
            new[key] = self.replace(item, form.format(label, key), axis)
            counts.append(0 if self._is_leaf(item) else self._num_leaves - before)
        is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
        if is_list and len(counts) > 1 and all(counts):
            self.lists[label] = len(counts)
        return new

    def _note_other(self, value: Any, label: str, axis: int) -> None:
        self.others[label] = (value, axis)
