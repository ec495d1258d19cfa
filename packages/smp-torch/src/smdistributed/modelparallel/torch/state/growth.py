"""What was put into a container, and nothing else: a log, a cache, features that a hook keeps.

Things are added, or tensors take the places of what was there: a hook that keeps the features of a
layer writes to the same key in each microbatch.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.state import holders
from smdistributed.modelparallel.torch.state.holders import MISSING


class Growth(NamedTuple):
    """What was put into a container that others see too.

    Attributes:
        name: of the container, the same on every rank.
        obj: a list, a deque, a dict or a set.
        added: by key or position; of a set by the item itself.
        before: what was there, where something was.
        is_own: it is in an attribute of the module that put it there, whose next call may use it.
    """

    name: str
    obj: Any
    added: Mapping[Any, Any]
    before: Mapping[Any, Any]
    is_own: bool = False

    @staticmethod
    def of(name: str, obj: Any, before: Any, now: Any, *, is_own: bool = False) -> Growth:
        """Returns what was put into a container, given what was in it before and is now."""
        added = added_to(before, now)
        former = {} if isinstance(before, set) else dict(_entries(before))
        kept = {key: former[key] for key in added if key in former}
        return Growth(name, obj, added, kept, is_own)

    @property
    def is_of_tensors(self) -> bool:
        """Whether tensors were put there, and nothing else."""
        return all(isinstance(each, torch.Tensor) for each in self.added.values())

    @property
    def is_gone(self) -> bool:
        """Whether none of it is there any more."""
        there = self.obj.values() if isinstance(self.obj, dict) else self.obj
        return {id(each) for each in there}.isdisjoint(map(id, self.added.values()))

    def replaced(self, make: Callable[[], Any]) -> Growth:
        """Puts something else in its place; returns what of that was added.

        What was in the place before is gone, as in the container of the script.
        """
        made = {key: make() for key in self.added}
        by_id = {id(value): made[key] for key, value in self.added.items()}
        if isinstance(self.obj, dict):
            for key, value in self.added.items():
                if dict.get(self.obj, key, MISSING) is value:
                    _plain(self.obj).__setitem__(self.obj, key, made[key])
        elif isinstance(self.obj, list | collections.deque):
            holders.refill_list(self.obj, [by_id.get(id(item), item) for item in self.obj])
        new = {key: each for key, each in made.items() if key not in self.before}
        return Growth(self.name, self.obj, new, {})

    def again(self) -> Growth:
        """Puts it there once more, in another microbatch."""
        before = {}
        for key, value in self.added.items():
            if isinstance(self.obj, dict):
                former = dict.get(self.obj, key, MISSING)
                _plain(self.obj).__setitem__(self.obj, key, value)
            elif key < len(self.obj):
                former, self.obj[key] = self.obj[key], value
            else:
                former = MISSING
                self.obj.append(value)
            if former is not MISSING:
                before[key] = former
        return Growth(self.name, self.obj, self.added, before, self.is_own)

    def remove(self) -> None:
        """Takes it out again, as far as it is still there, and puts back what was in its place."""
        if isinstance(self.obj, list | collections.deque):
            former = {id(self.added[key]): each for key, each in self.before.items()}
            # The same number may have been there before.
            gone = collections.Counter(id(e) for e in self.added.values() if id(e) not in former)
            items = []
            for item in reversed(self.obj):
                if gone[id(item)] > 0:
                    gone[id(item)] -= 1
                else:
                    items.append(former.get(id(item), item))
            holders.refill_list(self.obj, items[::-1])
        elif isinstance(self.obj, set):
            self.obj.difference_update(self.added)
        else:
            for key, value in self.added.items():
                if dict.get(self.obj, key, MISSING) is not value:
                    continue
                if key in self.before:
                    _plain(self.obj).__setitem__(self.obj, key, self.before[key])
                else:
                    _plain(self.obj).__delitem__(self.obj, key)


def _plain(obj: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Returns the class of Python's own that a dict is of, whose order knows of all its keys."""
    is_ordered = isinstance(obj, collections.OrderedDict)
    return collections.OrderedDict if is_ordered else dict


def added_to(before: Any, now: Any) -> dict[Any, Any]:
    """Returns what a container has that it had not."""
    if isinstance(now, set):
        return dict.fromkeys(now - before)
    former = dict(_entries(before))
    return {
        key: value for key, value in _entries(now) if key not in former or former[key] is not value
    }


def is_growth(obj: Any, before: Any, now: Any) -> bool:
    """Whether things were added to a container, or tensors put into it, and no more has changed."""
    if isinstance(obj, list | collections.deque):
        is_longer = len(now) >= len(before)
        return is_longer and all(map(_may_follow, before, now[: len(before)]))
    if isinstance(obj, dict) and isinstance(before, dict):  # not which names it has
        return all(key in now and _may_follow(value, now[key]) for key, value in before.items())
    return isinstance(obj, set) and before <= now


def _may_follow(before: Any, now: Any) -> bool:
    return before is now or isinstance(now, torch.Tensor)


def _entries(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)
