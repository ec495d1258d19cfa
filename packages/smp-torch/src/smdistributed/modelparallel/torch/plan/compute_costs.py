"""What the passes of calls cost: counted in floating-point operations, or measured in seconds.

Counted costs say how work is shared out, and are the same wherever they are counted. Measured ones
know that a normalization or an attention takes longer than its operations say, and differ a little
each time, so one rank measures and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smdistributed.modelparallel.torch.record.work import Work

#: What a backward pass takes, in forward passes, where operations are counted: products with
#: weights are two; attention computes its scores again, and others read gradients besides what
#: they have read before.
_BACKWARD_OF_WEIGHTS, _BACKWARD_OF_OTHERS = 2.0, 2.5
#: What operations that are compiled as one move, of what each by itself moves, about.
_MOVED_TOGETHER = 0.25


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

    def __sub__(self, other: PassCosts) -> PassCosts:
        return self + PassCosts(-other.forward, -other.backward, -other.weights)


class ComputeCosts:
    """Turns work into costs; the same on every rank.

    Args:
        compiles_runs: what lies between modules is compiled.

    Attributes:
        compiles_runs: as given.
        measures: whether costs are seconds.
    """

    def __init__(self, *, compiles_runs: bool = False) -> None:
        self.compiles_runs = compiles_runs
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
        others = work.flops - work.weight_flops
        backward = _BACKWARD_OF_WEIGHTS * work.weight_flops + _BACKWARD_OF_OTHERS * others
        return PassCosts(work.flops, backward, work.weight_flops)

    def saved(self, moved: int) -> PassCosts:
        """Returns what compiling saves, about, of the operations that stand for moving memory.

        Args:
            moved: of the work between modules, whose runs are not known yet.
        """
        if not self.compiles_runs or self.measures:
            return PassCosts()
        return self.of(Work(flops=round((1 - _MOVED_TOGETHER) * moved)))
