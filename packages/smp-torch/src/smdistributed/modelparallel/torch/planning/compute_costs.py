"""What the passes of calls cost: counted in floating-point operations, or measured in seconds.

Counted costs say how work is shared out, and are the same wherever they are counted. Measured ones
know that a normalization or an attention takes longer than its operations say, and differ a little
each time, so one rank measures and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.torch.record.costs.work import Work

#: What operations that are compiled as one move, of what each by itself moves, about.
_MOVED_TOGETHER = 0.25


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
        return PassCosts.counted(work.weight_flops, work.flops - work.weight_flops)

    def saved(self, moved: int) -> PassCosts:
        """Returns what compiling saves, about, of the operations that stand for moving memory.

        Args:
            moved: of the work between modules, whose runs are not known yet.
        """
        if not self.compiles_runs or self.measures:
            return PassCosts()
        return self.of(Work(flops=round((1 - _MOVED_TOGETHER) * moved)))
