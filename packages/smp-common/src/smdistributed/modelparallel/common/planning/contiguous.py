"""Cuts a sequence of loads into contiguous parts so that the heaviest part is as light as can be.

Everything is an integer: ties are exact, and every rank that computes a cut computes the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

# A cost, the least over all ways to cut, or None where there is none.
_Cost = int | None


@dataclass(frozen=True)
class CutProblem:
    """A sequence to be cut.

    Attributes:
        loads: of every item; not negative.
        is_avoided: for every item, whether a cut right before it is bad.
        crossing_bytes: what crosses a cut right before every item.
        base_loads: for every part, the load that it has anyway.
        needs_item: for every part, whether it must get an item; such a part has no base load.
    """

    loads: Sequence[int]
    is_avoided: Sequence[bool]
    crossing_bytes: Sequence[int]
    base_loads: Sequence[int]
    needs_item: Sequence[bool]

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.loads)]

    def bottleneck(self) -> int:
        """The least possible load of the heaviest part.

        Dynamic programming over (part, number of items). Where the last part begins, the load of
        the parts before grows and its own falls, so the best beginning only moves on with the
        number of items, and one pass over the items serves a part.
        """
        ends = self._ends
        # best[i]: heaviest part when the parts so far take the first i items; from `fewest` on.
        best, fewest, most = [0], 0, 0
        for base, need in zip(self.base_loads, self.needs_item, strict=True):
            row = [0] * (fewest + need)
            begin = fewest
            for end in range(fewest + need, len(ends)):
                heaviest = max(best[begin], ends[end] - ends[begin] + base)
                while begin < min(end - need, most):
                    moved = max(best[begin + 1], ends[end] - ends[begin + 1] + base)
                    if moved > heaviest:
                        break
                    heaviest = moved
                    begin += 1
                row.append(heaviest)
            best, fewest, most = row, fewest + need, len(self.loads)
        return best[-1]

    def cuts(self) -> list[int]:
        """The first item of every part, plus the number of items as an end.

        No part is heavier than the bottleneck. Among such cuts the fewest bad ones are taken; then
        the most even ones, by the sum of squared loads; then those that the fewest bytes cross;
        then those whose last parts begin earliest. An empty part begins where the next one does.
        """
        bound = self.bottleneck()
        count = len(self.loads)
        # The criteria are digits of one number, so that one comparison decides.
        byte_digits = 1 + sum(self.crossing_bytes)
        square_digits = 1 + (sum(self.loads) + sum(self.base_loads)) ** 2
        cut_costs = [
            avoided * square_digits * byte_digits + num_bytes
            for avoided, num_bytes in zip(self.is_avoided, self.crossing_bytes, strict=True)
        ]
        cheapest: list[_Cost] = [0] + [None] * count
        begins_of_parts = []
        for base, need in zip(self.base_loads, self.needs_item, strict=True):
            starts = [
                None if cost is None else cost + (cut_costs[begin] if begin else 0)
                for begin, cost in enumerate(cheapest[:-1])
            ]
            row, begins = self._best_last_part(starts, base, bound, byte_digits)
            if not need and base <= bound:
                empty = base * base * byte_digits
                for end, cost in enumerate(cheapest):
                    best = row[end]
                    if cost is not None and (best is None or cost + empty < best):
                        row[end], begins[end] = cost + empty, end
            cheapest = row
            begins_of_parts.append(begins)
        cuts = [count]
        for begins in reversed(begins_of_parts):
            cuts.append(begins[cuts[-1]])
        return cuts[::-1]

    def _best_last_part(
        self, starts: Sequence[_Cost], base: int, bound: int, square_unit: int
    ) -> tuple[list[_Cost], list[int]]:
        """For every number of items, the least cost and the beginning of a last part with items.

        Squares are convex, so the best beginning only moves on with the number of items: the
        middle one, found by a search, halves the searches of both sides.

        Args:
            starts: cost of everything up to a part that begins at an item.
            base: load that the part has anyway.
            bound: load that it may have.
            square_unit: what one squared load counts.
        """
        ends = self._ends
        row: list[_Cost] = [None] * len(ends)
        begins = [0] * len(ends)
        reachable = [begin for begin, cost in enumerate(starts) if cost is not None]
        if not reachable:
            return row, begins
        spans = []
        for end in range(1, len(ends)):
            first = max(bisect_left(ends, ends[end] + base - bound), reachable[0])
            last = min(end - 1, reachable[-1])
            if first <= last:
                spans.append((end, first, last))
        pending = [(0, len(spans), 0, len(ends))]
        while pending:
            low, high, least, most = pending.pop()
            if low == high:
                continue
            middle = (low + high) // 2
            end, first, last = spans[middle]
            load = ends[end] + base
            for begin in range(max(first, least), min(last, most) + 1):
                start = starts[begin]
                if start is None:
                    continue
                cost = start + (load - ends[begin]) ** 2 * square_unit
                best = row[end]
                if best is None or cost < best:
                    row[end], begins[end] = cost, begin
            pending.append((low, middle, least, begins[end]))
            pending.append((middle + 1, high, begins[end], most))
        return row, begins
