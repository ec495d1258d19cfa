"""What a rank's passes hold in memory at their fullest, given their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from smdistributed.modelparallel.common.planning.schedule import Action, Kind


@dataclass(frozen=True)
class PassMemory:
    """Bytes of a part of a model, for one microbatch; of parameters and their gradients none.

    Attributes:
        kept: from the forward pass to the backward pass.
        forward: the most that is there in the forward pass.
        backward: the same of the backward pass, which begins with what is kept.
        first_half: the same of a backward pass that leaves the gradients of weights for later.
        waiting: what the gradients of weights are computed from, where they wait.
        weights: of the largest gradient of a weight, which is there before it is added to the sum.
        held: from the forward pass to the backward pass, although all is computed again.
    """

    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    first_half: float = 0.0
    waiting: float = 0.0
    weights: float = 0.0
    held: float = 0.0

    def then(self, other: PassMemory) -> PassMemory:
        """Returns the memory of two parts that a microbatch passes one after the other."""
        return PassMemory(
            self.kept + other.kept,
            max(self.forward, self.kept + other.forward),
            max(self.backward, self.kept + other.backward),
            max(other.waiting + self.first_half, self.kept + other.first_half),
            self.waiting + other.waiting,
            max(self.weights, other.weights),
            self.held + other.held,
        )

    def beside(self, more: float) -> PassMemory:
        """Returns that with more that is there from the forward pass to the backward pass."""
        return replace(
            self,
            kept=self.kept + more,
            forward=self.forward + more,
            backward=self.backward + more,
            first_half=self.first_half + more,
        )

    def again(self, given: float) -> PassMemory:
        """Returns that of a part which the backward pass computes again.

        Args:
            given: bytes of what it is given, which it keeps in place of all else.
        """
        return replace(self, kept=0.0).beside(given + self.held)

    def times(self, factor: float) -> PassMemory:
        """Returns that for ``factor`` times as many examples."""
        return PassMemory(
            factor * self.kept,
            factor * self.forward,
            factor * self.backward,
            factor * self.first_half,
            factor * self.waiting,
            self.weights,
            factor * self.held,
        )

    def most_in(self, kind: Kind) -> float:
        """Returns the most that is there in a pass."""
        if kind is Kind.FORWARD:
            return max(self.forward, self.kept)
        if kind is Kind.WEIGHT_GRADIENTS:
            return self.waiting + self.weights
        if kind is Kind.INPUT_GRADIENTS:
            return max(self.first_half, self.kept, self.waiting)
        return max(self.backward, self.kept)


def most_held(actions: Iterable[Action], of: Callable[[Action], PassMemory]) -> float:
    """Returns the most that passes hold at one time.

    Args:
        actions: of a rank, in their order.
        of: the memory of the segment of an action.
    """
    actions = list(actions)
    differentiated = {(each.segment, each.microbatch) for each in actions if each.kind.is_backward}
    held = most = 0.0
    for action in actions:
        memory = of(action)
        left = _left_by(action, memory)
        if (
            action.kind is Kind.FORWARD
            and (action.segment, action.microbatch) not in differentiated
        ):
            left = 0.0
        before = _found_by(action, memory)
        most = max(most, held - before + memory.most_in(action.kind))
        held += left - before
    return most


def in_flight(actions: Sequence[Action]) -> int:
    """Returns the most microbatches that a rank has begun and not ended at a time.

    Args:
        actions: of the rank, in their order.
    """
    last = {action.microbatch: place for place, action in enumerate(actions)}
    begun: set[int] = set()
    most = 0
    for place, action in enumerate(actions):
        begun.add(action.microbatch)
        most = max(most, len(begun))
        if last[action.microbatch] == place:
            begun.remove(action.microbatch)
    return most


def _left_by(action: Action, memory: PassMemory) -> float:
    """Returns what is kept after a pass for later ones."""
    if action.kind is Kind.FORWARD:
        return memory.kept
    return memory.waiting if action.kind is Kind.INPUT_GRADIENTS else 0.0


def _found_by(action: Action, memory: PassMemory) -> float:
    """Returns what earlier passes have kept for a pass."""
    if action.kind is Kind.FORWARD:
        return 0.0
    return memory.waiting if action.kind is Kind.WEIGHT_GRADIENTS else memory.kept
