"""What was seen when slices of a module gave the result of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from smdistributed.modelparallel.torch.tensor_parallel.auto.adapting import Adapting
from smdistributed.modelparallel.torch.tensor_parallel.auto.meetings import Meeting, Meetings
from smdistributed.modelparallel.torch.tensor_parallel.auto.statistics import (
    AddUp,
    Reduction,
    Statistics,
)


@dataclass(frozen=True)
class Proof:
    """What was seen when slices gave the result of the whole.

    Attributes:
        outputs: of each tensor of the result: the dim along which ranks have slices, or ``SUM``,
            ``MEAN``, ``COMMON`` or ``SAME``.
        draws: of each dropout, the dim along which its input is split; None if it is whole.
        meetings: of slices with what is whole.
        reductions: in which ranks sum what they have, and others between them; none if none does.
        read: the attributes that its modules have read: name of the module, of the attribute. Of
            one in which these are the same, the rest being equal, it is a proof, too.
    """

    outputs: tuple[int | str, ...]
    draws: tuple[int | None, ...]
    meetings: tuple[Meeting, ...]
    reductions: tuple[Reduction, ...]
    read: frozenset[tuple[str, str]]

    def adapting(self, size: int, rank: int, examples: int, add_up: AddUp) -> Adapting:
        """Returns what adapts one call to slices of a rank, as was seen.

        Args:
            size: how many ranks there are.
            rank: which of them this is.
            examples: of the call.
            add_up: returns the sum over the ranks.
        """
        statistics = Statistics(size, rank, add_up, known=self.reductions)
        return Adapting(
            Meetings(size, rank, examples, self.meetings), statistics if self.reductions else None
        )

    @property
    def verdict(self) -> object:
        """What ranks must have found alike."""
        return self.outputs, *self.adaptions

    @property
    def adaptions(self) -> tuple[object, ...]:
        """What becomes of functions that code calls."""
        return self.draws, self.meetings, self.reductions
