"""Whether containers, attributes and entries still hold the objects that they held: in one go.

A step asks that before each call of a module, of all that the module can see. Going over the
identities without code in Python costs less than a comparison one by one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_chained = itertools.chain.from_iterable


class Identities:
    """The objects in some places.

    Args:
        mappings: dicts, and the namespaces of classes.
        sequences: lists, deques and sets.
        attributes: objects, and the name of an attribute of each.
        entries: dicts, and a key in each.
        sized: dicts of which it is enough to know how much is in them.
    """

    #: So that who holds a copy shows as such to the garbage collector.
    __slots__ = (
        *("_attributes", "_contents", "_entries", "_items", "_keys"),
        *("_lengths", "_mappings", "_others", "_sized", "_sizes"),
    )

    def __init__(
        self,
        mappings: Iterable[Mapping[Any, Any]] = (),
        sequences: Iterable[Collection[Any]] = (),
        attributes: Iterable[tuple[Any, str]] = (),
        entries: Iterable[tuple[dict[Any, Any], Any]] = (),
        sized: Iterable[dict[Any, Any]] = (),
    ) -> None:
        self._sized = list(sized)
        self._lengths = list(map(len, self._sized))
        self._mappings = list(mappings)
        # Views show what is in a dict when they are looked at.
        self._contents: list[Collection[Any]] = [*map(_values, self._mappings), *sequences]
        self._attributes = _transposed(attributes)
        self._entries = _transposed(entries)
        self._sizes = list(map(len, self._contents))
        self._items = list(_chained(self._contents))
        self._keys = list(_chained(self._mappings))
        self._others = list(self._other_places())

    def are_current(self) -> bool:
        """Whether every place still has the same object, under the same key."""
        same = operator.is_
        if (
            list(map(len, self._contents)) != self._sizes
            or list(map(len, self._sized)) != self._lengths
            or not all(map(same, self._items, _chained(self._contents)))
            or not all(map(same, self._keys, _chained(self._mappings)))
        ):
            return False
        try:
            return all(map(same, self._others, self._other_places()))
        except (AttributeError, KeyError, ValueError):  # it is gone, or a cell is empty
            return False

    def note(self, number: int) -> None:
        """Takes what is in a container now for what is to be there.

        Args:
            number: of it; sequences are counted on from mappings.
        """
        start = sum(self._sizes[:number])
        end = start + self._sizes[number]
        self._items[start:end] = self._contents[number]
        if number < len(self._mappings):
            self._keys[start:end] = self._mappings[number]
        self._sizes[number] = len(self._contents[number])

    def _other_places(self) -> Iterable[Any]:
        return itertools.chain(
            map(getattr, *self._attributes), map(operator.getitem, *self._entries)
        )


def _values(mapping: Mapping[Any, Any]) -> Collection[Any]:
    return dict.values(mapping) if isinstance(mapping, dict) else mapping.values()


def _transposed(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    pairs = list(pairs)
    return [one for one, _ in pairs], [other for _, other in pairs]
