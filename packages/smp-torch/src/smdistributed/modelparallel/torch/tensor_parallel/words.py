"""What the ranks of a tensor-parallel group tell each other before they exchange anything.

An exchange goes by its place among the others, so ranks that do different things would take one
tensor for another. Wherever a script decides what comes next, a call of a module, a backward pass,
the end of a step, each rank says what it is about to do: a word of one length, whatever it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.compat.between import no_call

#: Numbers that a word has beside what it is about.
LENGTH = 43


class Moment(enum.IntEnum):
    """What a rank is about to do."""

    BEGIN = 1
    CALL = 2
    BACKWARD = 3
    END = 4
    CONFIRMED = 5
    OTHER_WAY = 6
    WHOLE = 7
    RECORDED = 8
    AHEAD = 9


_DOING = {
    Moment.BEGIN: "begins a step",
    Moment.CALL: "calls {}",
    Moment.BACKWARD: "differentiates {}",
    Moment.END: "ends the step",
    Moment.CONFIRMED: "ends a pass that it runs as captured",
    Moment.WHOLE: "uses {} between steps",
    Moment.RECORDED: "has run the Python of the step",
    Moment.AHEAD: "computes {} before the step, for who asks for a value",
    Moment.OTHER_WAY: "goes another way than in the pass that was captured",
}


class Words:
    """The words of one group.

    Args:
        collectives: between the ranks.

    Attributes:
        join: takes part in a backward pass of others, of which this rank has nothing.
        leave: computes a pass as it is, since the Python of another rank goes another way.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.join: Callable[[], Any] | None = None
        self.leave: Callable[[], Any] | None = None

    @no_call
    def say(self, moment: Moment, about: str, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, as many from each. Collective: TP_GROUP.

        A rank that does something else while others differentiate takes part in that first. One
        that confirms a pass computes it where another goes another way.

        Args:
            moment: what comes next.
            about: of which module, for messages.
            numbers: at most ``LENGTH``; what is missing in them is zero.

        Raises:
            SMPError: the ranks do different things.
        """
        assert len(numbers) <= LENGTH, "a longer word would meet shorter ones"
        word = [int(moment), *numbers, *[0] * (LENGTH - len(numbers))]
        while True:
            everyones = self._collectives.compare(word)
            moments = {each[0] for each in everyones}
            if len(moments) == 1:
                return [each[1:] for each in everyones]
            if Moment.OTHER_WAY in moments and self.leave is not None:
                if moment is not Moment.OTHER_WAY:
                    self.leave()
                if moment in (Moment.OTHER_WAY, Moment.CONFIRMED):
                    return []
                continue
            if Moment.BACKWARD not in moments:
                self.refuse(
                    "must do the same, since they compute modules together",
                    _DOING[moment].format(about),
                )
            if moment is not Moment.BACKWARD:
                assert self.join is not None
                self.join()

    def refuse(self, rule: str, mine: str) -> NoReturn:
        """Raises an error with what each rank has received. Collective: TP_GROUP.

        Raises:
            SMPError: always.
        """
        everyones = self._collectives.compare_texts(mine)
        listed = "; ".join(f"tp_rank {rank}: {text}" for rank, text in enumerate(everyones))
        raise SMPError(f"the ranks of a tensor-parallel group {rule}; received {listed}.")
