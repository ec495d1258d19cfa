"""The sequence of groups that is cut into partitions: what they weigh, and what crosses a cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from smdistributed.modelparallel.common.planning.cost_tree import Group

#: Partition of every node, by its position.
Where = dict[tuple[int, int], int]


def loads_of(groups: Sequence[Group]) -> dict[Group, int]:
    """The loads of groups; without any cost, a partition is as heavy as its number of groups."""
    loads = {group: group.load for group in groups}
    return loads if any(loads.values()) else dict.fromkeys(groups, 1)


class Crossing:
    """What crosses a cut of the sequence."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._closed = sorted(
            (node for group in groups for node in group.nodes if not node.is_open),
            key=lambda node: node.position,
        )
        self._positions = [node.position for node in self._closed]

    def before(self, position: tuple[int, int]) -> int:
        """Bytes that cross a cut right before a position."""
        behind = bisect_left(self._positions, position) - 1
        return round(self._closed[behind].unit.output_bytes) if behind >= 0 else 0
