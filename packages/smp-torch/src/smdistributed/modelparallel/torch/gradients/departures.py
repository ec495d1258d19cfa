"""Which buckets leave for their reduction as gradients become final."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch

from smdistributed.modelparallel.torch.gradients.buckets import Bucket


class Departures:
    """The buckets of one step, which leave one after the other, on all ranks alike.

    A bucket leaves when all of its gradients are final and the buckets before it have left.

    Args:
        buckets: in the order in which they leave.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._waiting = [{parameter for parameter, _ in bucket.slots} for bucket in buckets]
        self._place = {each: place for place, one in enumerate(self._waiting) for each in one}
        self._num_left = 0

    def is_final(self, parameter: torch.Tensor) -> bool:
        """Whether nothing may be added to a gradient any more."""
        place = self._place.get(parameter)
        return place is not None and parameter not in self._waiting[place]

    def finish(self, parameter: torch.Tensor) -> Sequence[Bucket]:
        """Takes note that a gradient is final; returns the buckets that leave now."""
        if (place := self._place.get(parameter)) is None:
            return ()
        self._waiting[place].discard(parameter)
        first = self._num_left
        while self._num_left < len(self._buckets) and not self._waiting[self._num_left]:
            self._num_left += 1
        return self._buckets[first : self._num_left]

    def finish_all(self) -> Sequence[Bucket]:
        """Takes note that all gradients are final; returns the buckets that leave now."""
        first, self._num_left = self._num_left, len(self._buckets)
        for one in self._waiting:
            one.clear()
        return self._buckets[first:]


class Foreseen:
    """Which buckets will leave within the backward passes of a step that is captured.

    Args:
        departures: of the step.
        everything: the parameters whose gradients are reduced.
        leaves_at_once: whether a gradient that a pass completes is final once it was added up.
    """

    def __init__(
        self,
        departures: Departures,
        everything: Set[torch.Tensor],
        leaves_at_once: Callable[[torch.Tensor], bool],
    ) -> None:
        self._departures = departures
        self._everything = everything
        self._leaves_at_once = leaves_at_once
        self._completes: Set[torch.Tensor] = frozenset()

    def enter_pass(self, completes: Set[torch.Tensor]) -> None:
        """Starts a backward pass; see ``GradientReduction``."""
        for parameter in self._completes:
            self._departures.finish(parameter)
        self._completes = completes

    def enter_last_pass(self) -> None:
        """Starts the last backward pass."""
        self.enter_pass(self._everything)

    def added(self, parameter: torch.Tensor) -> bool:
        """Takes note of what was added to a gradient; returns whether buckets leave now."""
        if parameter not in self._completes or not self._leaves_at_once(parameter):
            return False
        return bool(self._departures.finish(parameter))
