"""What the passes of calls cost: counted in floating-point operations, or measured in seconds.

Counted costs say how work is shared out, and are the same wherever they are counted. Measured ones
know that a normalization or an attention takes longer than its operations say, and differ a little
each time, so one rank measures and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smdistributed.modelparallel.torch.record.work import Work

#: What a backward pass takes, in forward passes, where operations are counted.
_BACKWARD_FACTOR = 2.0


@dataclass(frozen=True)
class PassCosts:
    """What passes cost, in seconds or in any one unit for the whole model.

    Attributes:
        forward: the forward pass.
        backward: the whole backward pass.
        weights: the part of it that gives the gradients of weights of products.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0

    @property
    def both(self) -> float:
        """Forward and backward pass."""
        return self.forward + self.backward

    def __add__(self, other: PassCosts) -> PassCosts:
        return PassCosts(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
        )


class ComputeCosts:
    """Turns work into costs; the same on every rank.

    Attributes:
        measures: whether costs are seconds.
    """

    def __init__(self) -> None:
        self.measures = False
        self._measured: dict[str, PassCosts] = {}

    @property
    def measured(self) -> Mapping[str, PassCosts]:
        """By its name, the seconds that an operation takes."""
        return self._measured

    def take(self, measured: Mapping[str, PassCosts]) -> None:
        """Takes what was measured, by names of operations."""
        self._measured.update(measured)

    def of(self, work: Work) -> PassCosts:
        """Returns the costs of the work of a forward pass, and of its backward pass."""
        if self.measures:
            known = [self._measured[each] for each in work.operations if each in self._measured]
            return sum(known, PassCosts())
        return PassCosts(work.flops, _BACKWARD_FACTOR * work.flops, work.weight_flops)
