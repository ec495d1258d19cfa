"""What the ranks of a sharding group are about to do together.

Which parameters are used, and when, only the Python of the model says, so a rank cannot know that
its peers use the same. Before each exchange the ranks tell each other what they wish. A wish can be
required: without it this rank cannot go on. What is optional, gathering ahead or reducing early, is
done if all wish it at the same moment, and else left out. So the ranks never exchange one thing for
another: they agree, or each of them raises the same error.

Where a microbatch was captured as a CUDA graph, with its exchanges, all ranks launch it or none: at
the end of its Python they tell each other whether that did what was recorded. Who needs something
before has gone another way, and so do then the others.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.collectives.interface import Collectives


class Required(enum.IntEnum):
    """What a rank cannot go on without."""

    NOTHING = 0
    BEGIN = 1
    GATHER = 2
    END_OF_PASS = 3
    END = 4
    CONFIRMED = 5
    WHOLE = 6
    WHOLE_GRADIENT = 7


#: Numbers that a wish beyond what is required may have.
_MOST_OPTIONAL = 5
_FREE = -1


class Course:
    """Whether the ranks of a sharding group go on as recorded, which all of them know at a time.

    Args:
        collectives: of the group.

    Attributes:
        is_left: some rank goes another way in the microbatch in progress, and all know it.
        assumed: what was wished in a capture, where each rank goes on as if all wished the same;
            None outside of one.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.is_left = False
        self.assumed: list[tuple[int, ...]] | None = None

    def confirm(self, *, is_as_recorded: bool) -> bool:
        """Ends the Python of a microbatch; returns whether that of all ranks did as recorded.

        Collective: the sharding group, unless all know that it did not.

        Args:
            is_as_recorded: whether that of this rank did.
        """
        if not self.is_left:
            wish = [int(Required.CONFIRMED), int(is_as_recorded), *[_FREE] * _MOST_OPTIONAL]
            wishes = self._collectives.compare(wish)
            self.is_left = any(each[:2] != [int(Required.CONFIRMED), 1] for each in wishes)
        return not self.is_left


class Agreement:
    """Wishes of the ranks of one sharding group; every one of them calls ``meet``.

    Args:
        collectives: of the group.
        ranks: its global ranks.
        course: of the group.
        describe: what a required wish is in words: its kind and number.
    """

    def __init__(
        self,
        collectives: Collectives,
        ranks: Sequence[int],
        course: Course,
        describe: Callable[[Required, int], str],
    ) -> None:
        self._collectives = collectives
        self._ranks = ranks
        self._course = course
        self._describe = describe

    def meet(
        self, required: Required, number: int = 0, optional: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Waits until all ranks wish the same. Collective: the sharding group.

        Args:
            required: what this rank needs.
            number: of which unit.
            optional: what it wishes besides.

        Returns:
            what of ``optional`` all ranks begin with; empty too if others require something now.

        Raises:
            SMPError: the ranks require different things.
        """
        if self._course.assumed is not None:
            self._course.assumed.append((int(required), number, *optional))
            return tuple(optional)
        wished = [*optional[:_MOST_OPTIONAL], *[_FREE] * (_MOST_OPTIONAL - len(optional))]
        while True:
            wishes = self._collectives.compare([int(required), number, *wished])
            if any(each[0] == Required.CONFIRMED for each in wishes):
                self._course.is_left = True  # those go another way, too, and then wish something
                continue
            needs = {(each[0], each[1]) for each in wishes if each[0] != int(Required.NOTHING)}
            if len(needs) > 1:
                raise SMPError(self._difference(wishes))
            is_common = all((each[0], each[1]) in needs for each in wishes)
            if not needs or is_common:
                rows = zip(*(each[2:] for each in wishes), strict=True)
                common = itertools.takewhile(lambda row: len(set(row)) == 1, rows)
                return tuple(row[0] for row in common if row[0] != _FREE)
            if required is Required.NOTHING:
                return ()
            # The others have something optional to say first.

    def check_not_captured(self, why: str) -> None:
        """Raises in a capture, which then does not come about.

        Args:
            why: what is done cannot be done by a graph.

        Raises:
            UnsupportedError: a microbatch is captured.
        """
        if self._course.assumed is not None:
            raise UnsupportedError(why)

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks. Collective: the sharding group."""
        if self._course.assumed is not None:
            self._course.assumed.append(tuple(numbers))
            return [list(numbers)] * len(self._ranks)
        return self._collectives.compare(numbers)

    def _difference(self, wishes: Sequence[Sequence[int]]) -> str:
        told = "; ".join(
            f"rank {rank} {self._describe(Required(wish[0]), wish[1])}"
            for rank, wish in zip(self._ranks, wishes, strict=True)
        )
        return (
            "with sharded_data_parallel_degree above 1 the ranks of a sharding group must use the "
            f"parameters of the model in the same order, since they gather them together: {told}. "
            "Let all of them take the same branches, and make as many calls."
        )
