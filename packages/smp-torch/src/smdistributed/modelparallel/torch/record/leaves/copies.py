"""Objects with state as each rank has them, while a step is recorded; see ``state/carried.py``."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind
from smdistributed.modelparallel.torch.state.carried import Carried, History
from smdistributed.modelparallel.torch.state.contents import (
    Contents,
    Effects,
    copied,
    same_in_objects,
    state_of,
    tensors_held,
)
from smdistributed.modelparallel.torch.tensors.nested import same


def changed_between(name: str, where: str, carried: Carried) -> UnsupportedError:
    """Returns the error of a module that is given an object which code between modules changes.

    Args:
        name: of the module.
        where: it is called.
        carried: the object.
    """
    return UnsupportedError(
        f"{name} is given {carried} in {where}, which code between modules has changed since "
        "another module was given it. Ranks have copies of such an object, which this code does "
        "not reach: change it before the first module is given it, or in modules, or hand over "
        "what changes as an argument of its own."
    )


class RankCopies:
    """The copies of all ranks, as far as the modules of a microbatch have come."""

    def __init__(self) -> None:
        self._histories: dict[Carried, History] = {}
        #: The partition that has done each thing, and what it did.
        self._deeds: list[tuple[int, Carried, Effects]] = []
        self._num_done: collections.Counter[int] = collections.Counter()
        self._contents: dict[tuple[int, Carried], Contents] = {}
        #: The objects as modules have left them, wherever these run.
        self._left: dict[Carried, Contents] = {}
        #: Those that modules were given, and of them those to whose tensors code has written since.
        self._given: dict[Carried, None] = {}
        self._written: set[Carried] = set()

    def look_at(self, entry: Entry) -> None:
        """Looks at a call between modules, or of one: does it write to what is in an object?

        Raises:
            UnsupportedError: a module is given an object to whose tensors code has written.
        """
        for carried, _ in entry.held:
            if carried in self._written:
                raise changed_between(entry.name, entry.where, carried)
            self._given.setdefault(carried)
        if entry.kind is EntryKind.LEAF or not entry.changed:
            return
        memory = {storage_of(each) for each in entry.changed if each.layout is torch.strided}
        for carried in self._given:
            left = self._left.get(carried)
            held = tensors_held(carried.pristine if left is None else left.obj)
            if any(each.layout is torch.strided and storage_of(each) in memory for each in held):
                self._written.add(carried)

    def note(self, entry: Entry, partition: int) -> None:
        """Takes note of what a module has done to objects.

        Args:
            entry: of its call.
            partition: that has the module.

        Raises:
            UnsupportedError: code between modules has changed one of the objects before.
        """
        for carried, effects in entry.effects:
            self.check_left(entry, carried)
            self._left[carried].apply(effects)
            history = self._histories.setdefault(carried, History(carried))
            history.add(len(self._deeds), entry.name, effects)
            self._deeds.append((partition, carried, effects))

    def check_left(self, entry: Entry, carried: Carried) -> None:
        """Makes sure that a module is given an object as the modules before have left it.

        Raises:
            UnsupportedError: code between modules has changed it.
        """
        if carried not in self._left:
            self._left[carried] = Contents(carried.stand_in())
        found = dict(entry.held)[carried]
        if not same(found, state_of(self._left[carried].obj), same_in_objects):
            raise changed_between(entry.name, entry.where, carried)

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
