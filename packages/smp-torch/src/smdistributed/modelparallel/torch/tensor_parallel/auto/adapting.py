"""What calls of functions become where one call of a split module runs on slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.torch.tensor_parallel.auto.meetings import Meeting, Meetings
from smdistributed.modelparallel.torch.tensor_parallel.auto.statistics import (
    Reduction,
    Statistics,
)


@dataclass
class Adapting:
    """Adapts the calls of functions in a call of a split module to its slices.

    Attributes:
        meetings: of slices with what is whole.
        statistics: of what lies on several ranks; None: there are none.
    """

    meetings: Meetings
    statistics: Statistics | None

    @property
    def found(self) -> tuple[tuple[Meeting, ...], tuple[Reduction, ...]]:
        """The meetings up to now, and the reductions if some span the ranks."""
        reductions = self.statistics.found if self.statistics is not None else []
        spans = any(each.spans for each in reductions)
        return tuple(self.meetings.found), tuple(reductions if spans else ())

    def copy(self) -> Adapting:
        """Returns one that goes on from where this one is."""
        return Adapting(self.meetings.copy(), self.statistics and self.statistics.copy())

    def adapted(
        self, function: Any, args: Sequence[Any], kwargs: Any
    ) -> tuple[Callable[..., Any], Sequence[Any], Any]:
        """Returns what is to be called in place of a function, and with what.

        Raises:
            SMPError: the call comes in another way than when slices were proven.
        """
        if self.statistics is not None:
            spanning = self.statistics.spanning(function, args, kwargs)
            if spanning is not None:
                return spanning, args, kwargs
        args, kwargs = self.meetings.met(function, args, kwargs)
        return function, args, kwargs
