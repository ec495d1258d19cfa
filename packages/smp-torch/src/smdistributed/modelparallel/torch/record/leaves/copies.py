"""Objects with state as each rank has them, while a step is recorded; see ``state/carried.py``."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from smdistributed.modelparallel.torch.record.trace.tree import Entry
from smdistributed.modelparallel.torch.state.carried import Carried, History
from smdistributed.modelparallel.torch.state.contents import Contents, Effects, copied


class RankCopies:
    """The copies of all ranks, as far as the modules of a microbatch have come."""

    def __init__(self) -> None:
        self._histories: dict[Carried, History] = {}
        #: The partition that has done each thing, and what it did.
        self._deeds: list[tuple[int, Carried, Effects]] = []
        self._num_done: collections.Counter[int] = collections.Counter()
        self._contents: dict[tuple[int, Carried], Contents] = {}

    def note(self, entry: Entry, partition: int) -> None:
        """Takes note of what a module has done to objects.

        Args:
            entry: of its call.
            partition: that has the module.
        """
        for carried, effects in entry.effects:
            history = self._histories.setdefault(carried, History(carried))
            history.add(len(self._deeds), entry.name, effects)
            self._deeds.append((partition, carried, effects))

    def of(self, partition: int) -> Callable[[Carried], Any]:
        """Returns what gives the objects that a module of a partition would be given now.

        They are for one call alone: what it does to them, nobody sees.
        """
        seen = {each.node: each.effects for h in self._histories.values() for each in h.deeds}
        for number in range(self._num_done[partition], len(self._deeds)):
            by, carried, effects = self._deeds[number]
            self._of(partition, carried).apply(effects if by == partition else seen[number])
        self._num_done[partition] = len(self._deeds)
        given: dict[Carried, Any] = {}

        def copy(carried: Carried) -> Any:
            if carried not in given:
                given[carried] = copied(self._of(partition, carried).obj)
            return given[carried]

        return copy

    def _of(self, partition: int, carried: Carried) -> Contents:
        place = partition, carried
        if place not in self._contents:
            self._contents[place] = Contents(carried.stand_in())
        return self._contents[place]
