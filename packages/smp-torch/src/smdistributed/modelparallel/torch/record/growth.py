"""What was added to a container, and nothing else: a log, or a cache."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from smdistributed.modelparallel.torch.record import holders
from smdistributed.modelparallel.torch.record.holders import MISSING


class Growth(NamedTuple):
    """What was added to a container that others see too.

    Attributes:
        obj: a list, a deque, a dict or a set.
        added: by key or position; of a set by the item itself.
    """

    obj: Any
    added: dict[Any, Any]

    def replaced(self, make: Callable[[], Any]) -> Growth:
        """Puts something else in its place, and returns that."""
        made = {key: make() for key in self.added}
        by_id = {id(value): made[key] for key, value in self.added.items()}
        if isinstance(self.obj, dict):
            for key, value in self.added.items():
                if dict.get(self.obj, key, MISSING) is value:
                    dict.__setitem__(self.obj, key, made[key])
        elif isinstance(self.obj, list | collections.deque):
            holders.refill_list(self.obj, [by_id.get(id(item), item) for item in self.obj])
        return Growth(self.obj, made)

    def remove(self) -> None:
        """Takes it out again, as far as it is still there."""
        if isinstance(self.obj, list | collections.deque):
            gone = set(map(id, self.added.values()))
            holders.refill_list(self.obj, [item for item in self.obj if id(item) not in gone])
        elif isinstance(self.obj, set):
            self.obj.difference_update(self.added)
        else:
            for key, value in self.added.items():
                if dict.get(self.obj, key, MISSING) is value:
                    dict.__delitem__(self.obj, key)


def added_to(before: Any, now: Any) -> dict[Any, Any]:
    """Returns what a container has that it had not."""
    if isinstance(now, list):
        return dict(enumerate(now[len(before) :], len(before)))
    if isinstance(now, set):
        return dict.fromkeys(now - before)
    return {key: value for key, value in now.items() if key not in before}


def is_growth(obj: Any, before: Any, now: Any) -> bool:
    """Whether things were added to a container, and nothing else has changed in it."""
    if isinstance(obj, list | collections.deque):
        return holders.same(before, now[: len(before)])
    if isinstance(obj, dict) and isinstance(before, dict):  # not which names it has
        return all(key in now and now[key] is value for key, value in before.items())
    return isinstance(obj, set) and before <= now
