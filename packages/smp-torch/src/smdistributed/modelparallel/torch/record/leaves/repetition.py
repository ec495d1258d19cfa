"""A leaf that runs once more, on other objects: its calls are those that it made before, or not."""

from __future__ import annotations

from collections.abc import Sequence

from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind


class Repetition:
    """Follows the calls of torch functions that a leaf makes once more.

    A call that it has made before, of the very same tensors, need not be made: it gives what it
    gave. After another one all are made.

    Args:
        calls: that it has made before, in order.

    Attributes:
        differs: it does not do the same.
    """

    def __init__(self, calls: Sequence[Entry]) -> None:
        self._calls = calls
        self._number = 0
        # What looks at tensors, or changes how they look, has to be done again to be seen.
        self.differs = any(
            each.kind is not EntryKind.CALL or each.repeats or each.is_of_hook for each in calls
        )

    @property
    def coming(self) -> Entry | None:
        """The call that it makes next if it does the same."""
        return None if self.is_over or self.differs else self._calls[self._number]

    @property
    def is_over(self) -> bool:
        """Whether it has made all calls that it made before."""
        return self._number == len(self._calls)

    def go_on(self) -> None:
        """Takes note that it has made the call that was coming."""
        self._number += 1
