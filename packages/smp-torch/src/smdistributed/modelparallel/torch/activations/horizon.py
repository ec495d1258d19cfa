"""Which activations are needed next, in the order of the passes of one rank.

A *region* is one call of a checkpointed function in a forward pass. Time is counted in *tasks*: a
pass through a region is one, and so is a pass of the schedule that has no region. What a backward
pass needs is ahead by so many tasks as lie between, which the schedule says, and the number of
regions that the same part of the model had before.

Source: model-parallel-extended-features-pytorch-activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Pass:
    """One pass of this rank.

    Attributes:
        part: of the model; equal for the passes of all microbatches through the same part.
        microbatch: its number.
        is_backward: its direction.
    """

    part: int
    microbatch: int
    is_backward: bool


class Region(Generic[_Content]):
    """One region of one forward pass.

    Attributes:
        contents: what it saved.
        is_used: whether its backward pass has begun.
    """

    def __init__(self) -> None:
        self.contents: list[_Content] = []
        self.is_used = False


class Horizon(Generic[_Content]):
    """What lies ahead.

    Args:
        num_tasks: how far ahead is looked.
    """

    def __init__(self, num_tasks: int) -> None:
        self._num_tasks = num_tasks
        self._passes: Sequence[Pass] = ()
        self._position = -1
        self._has_begun = False
        self._regions: dict[tuple[int, int], list[Region[_Content]]] = {}
        #: How many regions a part of the model has, as far as is known.
        self._known: dict[int, int] = {}

    def begin(self, passes: Sequence[Pass]) -> None:
        """Starts a step.

        Args:
            passes: of this rank, in their order.
        """
        self._passes = passes
        self._position = -1
        self._has_begun = False
        self._regions.clear()

    def enter(self, position: int) -> None:
        """Starts a pass, by its position; a step function may also return to an earlier one."""
        last = self._passes[self._position] if self._position >= 0 else None
        if last is not None and not last.is_backward:
            self._known[last.part] = len(self._regions_of(last))
        self._position = position
        self._has_begun = False

    def open(self) -> Region[_Content]:
        """Returns a new region of this pass."""
        region: Region[_Content] = Region()
        self._regions_of(self._passes[self._position]).append(region)
        return region

    def use(self, region: Region[_Content]) -> None:
        """Notes that the backward pass through a region begins."""
        region.is_used = self._has_begun = True

    def is_near(self) -> bool:
        """Whether the region opened last is needed within the horizon already.

        Not if nothing is known of the part: more regions may follow than memory has room for.
        """
        current = self._passes[self._position]
        if current.is_backward or current.part not in self._known:
            return False
        following = self._to_come(current)
        distance = following
        for each in self._passes[self._position + 1 :]:
            if each.is_backward and _is_same_part(each, current):
                return distance + following < self._num_tasks
            distance += max(1, self._known.get(each.part, 0))
            if distance >= self._num_tasks:
                break
        return False

    def ahead(self) -> Iterator[Region[_Content]]:
        """Yields the regions that are needed within the horizon, the next one first."""
        current = self._passes[self._position]
        left = self._num_tasks
        if not current.is_backward:
            left -= self._to_come(current, at_least=1)
        elif not self._has_begun:
            left += 1  # the first of them is the task that begins
        for each in self._passes[self._position + (not current.is_backward) :]:
            if left <= 0:
                return
            if not each.is_backward:
                left -= max(1, self._known.get(each.part, 0))
                continue
            waiting = [one for one in reversed(self._regions_of(each)) if not one.is_used]
            if each is not current:
                # Regions that a forward pass will still make come before those that it has made.
                to_come = self._to_come(each)
                left -= to_come if to_come or waiting else 1
            yield from waiting[: max(0, left)]
            left -= len(waiting)

    def _to_come(self, each: Pass, *, at_least: int = 0) -> int:
        """Returns how many regions a forward pass will make beside those that it has made."""
        made = max(at_least, len(self._regions_of(each)))
        return max(0, self._known.get(each.part, 0) - made)

    def _regions_of(self, each: Pass) -> list[Region[_Content]]:
        return self._regions.setdefault((each.part, each.microbatch), [])


def _is_same_part(one: Pass, other: Pass) -> bool:
    return (one.part, one.microbatch) == (other.part, other.microbatch)
