"""Cuts a sequence of loads into a V: from outside in, each rank takes a piece of either end.

With three ranks the pieces lie on ranks 0, 1, 2, 1, 0, so a microbatch goes up the ranks and comes
back. The two pieces of a rank count together. On the way up no rank is left out; the second piece
of a rank may be empty, where the first is heavy. A rank further on has less to do, since it begins
later. Everything is an integer, as in ``contiguous``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

# The bottleneck is found by so many halvings of what it may be: to a millionth of the whole load.
_HALVINGS = 20
# A rank may be heavier than need be by one in so many: loads are not known better, and an embedding
# table on the other rank is worth less than a first piece that is as long as the last. By twice
# that if a rank had one piece alone otherwise, which makes it wait longer.
_SLACKS = (100, 50)
# Cuts that are tried on both sides of a place.
_NEAR = 8
# How often each cut is looked at again, at most.
_SWEEPS = 10
#: The first item of what lies inside, and the first behind it.
_Inside = tuple[int, int]


@dataclass(frozen=True)
class VProblem:
    """A sequence to be cut.

    Attributes:
        loads: of every item; not negative.
        is_avoided: for every item, whether a cut right before it is bad.
        crossing_bytes: what crosses a cut right before every item.
        num_ranks: that share the items; at least one, at most as many as there are items.
        delay: what counts as load of a rank besides that of the one before it.
    """

    loads: Sequence[int]
    is_avoided: Sequence[bool]
    crossing_bytes: Sequence[int]
    num_ranks: int
    delay: int = 0

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.loads)]

    def bottleneck(self) -> int:
        """The least possible load of the heaviest rank, up to a millionth of the whole load."""
        total, latest = self._ends[-1], self.delay * (self.num_ranks - 1)
        low, high = max(-(-total // self.num_ranks), *self.loads) - 1, total + latest
        for _ in range(_HALVINGS):
            middle = (low + high + 1) // 2
            left = (self._load(*inside) for inside in self._insides(middle)[-1])
            if any(load + latest <= middle for load in left):
                high = middle
            else:
                low = middle
            if high - low <= 1:
                break
        return high

    def cuts(self) -> list[_Inside]:
        """For every rank, where what it and the ranks after it hold begins and ends.

        No rank is heavier than the bottleneck and a hundredth or two. Few pieces are empty, few
        cuts are bad, and then ranks and pieces are about even: one cut after the other is moved
        while that helps.
        """
        bottleneck = self.bottleneck()
        found = [self._cuts(bottleneck + bottleneck // slack) for slack in _SLACKS]
        return min(found, key=self._num_empty)

    def _cuts(self, bound: int) -> list[_Inside]:
        """The cuts for a load that no rank exceeds."""
        insides = self._insides(bound)
        found: list[_Inside] = []
        for rank in range(self.num_ranks - 1, 0, -1):
            held = found[-1] if found else None
            choices = self._choices(rank, held, insides[rank], bound - self.delay * rank)
            found.append(min(choices, key=lambda one: self._first_rating(rank, one, held)))
        cuts = [(0, len(self.loads)), *reversed(found)]
        for _ in range(_SWEEPS):
            former = list(cuts)
            for rank in range(1, self.num_ranks):
                cuts[rank] = self._moved(rank, cuts, bound)
            if cuts == former:
                break
        return cuts

    def _load(self, begin: int, end: int) -> int:
        return self._ends[end] - self._ends[begin]

    def _insides(self, bound: int) -> list[list[_Inside]]:
        """For every rank, the least that the ranks before it can leave, for each beginning of it.

        The ranks before take all up to the beginning, each something. One more of them can take
        the more from the other end, the less it finds between its own beginning and end: the
        least such load counts, over the beginnings from which it can come so far.
        """
        ends, count = self._ends, len(self.loads)
        rows = [[(0, count)]]
        for rank in range(1, self.num_ranks):
            room = bound - self.delay * (rank - 1)
            row: list[_Inside] = []
            former = iter(rows[-1])
            coming = next(former, None)
            # Candidates, the best first; one that came later and is better outlasts the others.
            window: deque[tuple[int, int]] = deque()
            for begin in range(count):
                while coming is not None and coming[0] < begin:
                    left = ends[coming[1]] - ends[coming[0]]
                    while window and window[-1][0] >= left:
                        window.pop()
                    window.append((left, coming[0]))
                    coming = next(former, None)
                while window and ends[begin] - ends[window[0][1]] > room:
                    window.popleft()
                if window:
                    least = window[0][0] + ends[begin] - room
                    row.append((begin, max(begin + 1, bisect_left(ends, least))))
            rows.append(row)
        return rows

    def _choices(
        self, rank: int, held: _Inside | None, insides: Sequence[_Inside], bound: int
    ) -> Iterator[_Inside]:
        """Yields where a rank's share may begin and end.

        Args:
            rank: the rank.
            held: what the ranks after it hold; None if there are none.
            insides: the least that the ranks before it can leave.
            bound: of its load.
        """
        ends = self._ends
        _, even_end = self._even(rank, held)
        near = bisect_left(ends, ends[-1] - even_end)
        for begin, least in insides:
            inner_begin, inner_end = held or (begin, begin)
            room = bound - (ends[inner_begin] - ends[begin])
            if (held and begin >= inner_begin) or room < 0:
                continue
            first = max(least, inner_end)
            last = bisect_right(ends, ends[inner_end] + room) - 1
            if first <= last:
                middle = min(max(near, first), last)
                for end in range(max(first, middle - _NEAR), min(last, middle + _NEAR) + 1):
                    yield begin, end

    def _even(self, rank: int, held: _Inside | None) -> tuple[int, int]:
        """The loads that the ranks before this one should take of either end to be as heavy."""
        ends = self._ends
        sides = (ends[held[0]], ends[-1] - ends[held[1]]) if held else (ends[-1] // 2,) * 2
        return sides[0] * rank // (rank + 1), sides[1] * rank // (rank + 1)

    def _first_rating(self, rank: int, inside: _Inside, held: _Inside | None) -> tuple[int, ...]:
        """How bad it is that a rank and those after it have what is inside."""
        ends, (begin, end) = self._ends, inside
        own = [held[0] - begin, end - held[1]] if held else [end - begin]
        outer = [begin, len(self.loads) - end]
        empty = sum(not num for num in own) + sum(max(0, rank - num) for num in outer)
        even_begin, even_end = self._even(rank, held)
        uneven = (ends[begin] - even_begin) ** 2 + (ends[-1] - ends[end] - even_end) ** 2
        return empty, self._num_bad(inside), uneven, begin, end

    def _moved(self, rank: int, cuts: Sequence[_Inside], bound: int) -> _Inside:
        """Returns the best cut between a rank and the one before it, near the present one."""
        begin, end = cuts[rank]
        outer, inner = cuts[rank - 1], (*cuts[rank + 1 :], None)[0]
        least_end = begin if inner is None else inner[1]

        def rating(one: _Inside) -> tuple[int, ...]:
            pieces = self._pieces(outer, one), self._pieces(one, inner)
            loads = [[self._load(*piece) for piece in each] for each in pieces]
            ends = [sum(each) + self.delay * (rank - 1 + i) for i, each in enumerate(loads)]
            if max(ends) > bound:
                return (1,)
            empty = sum(low == high for each in pieces for low, high in each)
            # Halves of the last rank's one piece, which is as long as two.
            uneven = sum(2 * end**2 for end in ends)
            uneven += sum(2 * load**2 // (3 - len(each)) for each in loads for load in each)
            num_bytes = sum(self.crossing_bytes[place] for place in self._places(one))
            return 0, empty, self._num_bad(one), uneven, num_bytes

        choices = [
            (low, high)
            for low in range(max(outer[0], begin - _NEAR), begin + _NEAR + 1)
            for high in range(max(low, least_end, end - _NEAR), min(outer[1], end + _NEAR) + 1)
            if outer[0] < low < (high if inner is None else inner[0])
        ]
        return min([(begin, end), *choices], key=rating)

    def _num_empty(self, cuts: Sequence[_Inside]) -> int:
        pieces = [self._pieces(*pair) for pair in itertools.pairwise(cuts)]
        return sum(begin == end for each in pieces for begin, end in each)

    @staticmethod
    def _pieces(outer: _Inside, inner: _Inside | None) -> list[_Inside]:
        return [outer] if inner is None else [(outer[0], inner[0]), (inner[1], outer[1])]

    def _places(self, inside: _Inside) -> list[int]:
        return [place for place in inside if 0 < place < len(self.loads)]

    def _num_bad(self, inside: _Inside) -> int:
        return sum(self.is_avoided[place] for place in self._places(inside))
