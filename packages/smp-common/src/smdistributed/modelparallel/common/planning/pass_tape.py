"""What a microbatch's passes hold in memory, operation by operation, and any part of them."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smdistributed.modelparallel.common.planning.pass_memory import PassMemory

#: Operations from one of a tape to before another one.
Span = tuple[int, int]


class Keeping(NamedTuple):
    """How long memory is kept for the backward pass.

    Attributes:
        at: the operation for whose gradient it is.
        freed: in how many operations of the backward pass it is free again; None if it is not.
    """

    at: int
    freed: int | None = None


class Memory(NamedTuple):
    """Memory that an operation made.

    Attributes:
        num_bytes: its size.
        born: the operation.
        uses: those that read it or write to it, ascending.
        kept: what is kept of it.
        is_held: it stays to the backward pass although what made it is computed again.
    """

    num_bytes: int
    born: int
    uses: tuple[int, ...] = ()
    kept: tuple[Keeping, ...] = ()
    is_held: bool = False


class Product(NamedTuple):
    """A product with a weight, whose gradient may be computed later than others.

    Attributes:
        at: the operation.
        read: the places of the memories that it reads.
        given_bytes: of what it gives.
        weight_bytes: of the weight.
    """

    at: int
    read: tuple[int, ...]
    given_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class BackwardTape:
    """The operations of the backward pass, and the memory that is there at each.

    Attributes:
        positions: of each operation, where in the forward pass it belongs. Empty where the backward
            pass is not known.
        changes: from an operation on, how much more memory there is than before it.
    """

    positions: tuple[int, ...] = ()
    changes: Mapping[int, int] = field(default_factory=dict)

    @functools.cached_property
    def _alive(self) -> list[int]:
        """Of each operation, what the backward pass has made and not let go."""
        changes = (self.changes.get(each, 0) for each in range(len(self.positions)))
        return list(itertools.accumulate(changes))

    @functools.cached_property
    def _by_position(self) -> tuple[list[int], list[int]]:
        """The positions, ascending, and their operations; there may be several passes."""
        operations = sorted(range(len(self.positions)), key=lambda each: self.positions[each])
        return [self.positions[each] for each in operations], operations

    def within(self, spans: Iterable[Span]) -> list[int]:
        """Returns the operations that belong to spans of the forward pass, ascending."""
        positions, operations = self._by_position
        found: list[int] = []
        for start, end in spans:
            first = bisect.bisect_left(positions, start)
            found += operations[first : bisect.bisect_left(positions, end)]
        return sorted(found)

    def most(
        self,
        spans: Sequence[Span],
        kept: Iterable[tuple[int | None, int]],
        waiting: Iterable[tuple[int, int]] = (),
    ) -> int | None:
        """Returns the most that is there in the backward pass of a part; None if it is not known.

        Args:
            spans: its operations of the forward pass.
            kept: before which operation here what it kept is free again, and how large it was.
            waiting: whose gradient is kept when it has been used, and how large that is.
        """
        operations = self.within(spans)
        if not operations:
            return None
        kept = list(kept)
        most = held = sum(num_bytes for _, num_bytes in kept)
        gone = sorted((at, num_bytes) for at, num_bytes in kept if at is not None)
        gone.reverse()
        later = sorted(waiting)
        for operation in operations:
            while gone and gone[-1][0] <= operation:
                held -= gone.pop()[1]
            while later and self.positions[operation] < later[-1][0]:
                held += later.pop()[1]
            most = max(most, held + self._alive[operation])
        return most


@dataclass(frozen=True)
class PassTape:
    """The operations of one microbatch; plain data.

    Attributes:
        num_operations: of the forward pass.
        memories: in the order of the operations that made them.
        products: with weights, ascending.
        backward: the backward pass.
    """

    num_operations: int
    memories: tuple[Memory, ...] = ()
    products: tuple[Product, ...] = ()
    backward: BackwardTape = field(default_factory=BackwardTape)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PassTape:
        """Reads what ``dataclasses.asdict`` has made, behind JSON."""
        backward = document["backward"]
        return cls(
            document["num_operations"],
            tuple(
                Memory(size, born, tuple(uses), tuple(Keeping(*each) for each in kept), is_held)
                for size, born, uses, kept, is_held in document["memories"]
            ),
            tuple(Product(at, tuple(read), *sizes) for at, read, *sizes in document["products"]),
            BackwardTape(
                tuple(backward["positions"]),
                {int(at): change for at, change in backward["changes"].items()},
            ),
        )

    def memory(self, spans: Iterable[Span]) -> PassMemory:
        """Returns what the passes of a part of the microbatch hold.

        Args:
            spans: its operations.
        """
        within = _Within(spans)
        forward: dict[int, int] = {}
        kept: dict[int, tuple[int | None, int]] = {}
        held = 0
        for place in self._met(within):
            each = self.memories[place]
            held += each.num_bytes * (each.is_held and within.has(each.born))
            first, last = within.reach(each.born, each.uses)
            inside = [one for one in each.kept if within.has(one.at)]
            if inside:
                ends = [one.freed for one in inside]
                freed = None if None in ends else max(one for one in ends if one is not None)
                kept[place] = freed, each.num_bytes
                first = min(one.at for one in inside) if first is None else first
                last = within.end
            if first is not None and last is not None:
                forward[first] = forward.get(first, 0) + each.num_bytes
                forward[last] = forward.get(last, 0) - each.num_bytes
        kept_bytes = sum(num_bytes for _, num_bytes in kept.values())
        most_forward = max(itertools.accumulate(forward[at] for at in sorted(forward)), default=0)
        products = self._products(within)
        read = {place for each in products for place in each.read if place in kept}
        waiting = [(None if place in read else end, size) for place, (end, size) in kept.items()]
        given = [(each.at, each.given_bytes) for each in products]
        # Without a backward pass: the gradient of each tensor is as large as the tensor.
        unknown = 2 * max(most_forward, kept_bytes)
        return PassMemory(
            kept_bytes,
            max(most_forward, kept_bytes),
            self.backward.most(within.spans, kept.values()) or unknown,
            self.backward.most(within.spans, waiting, given) or unknown,
            sum(kept[place][1] for place in read) + sum(each.given_bytes for each in products),
            max((each.weight_bytes for each in products), default=0),
            held,
        )

    @functools.cached_property
    def _met_by(self) -> list[list[int]]:
        """Of each operation, the places of the memories that it makes, uses or has kept."""
        found: list[list[int]] = [[] for _ in range(self.num_operations + 1)]
        for place, each in enumerate(self.memories):
            for at in {each.born, *each.uses, *(one.at for one in each.kept)}:
                found[at].append(place)
        return found

    def _met(self, within: _Within) -> list[int]:
        """Returns the places of the memories that operations meet, ascending."""
        met = (self._met_by[at] for start, end in within.spans for at in range(start, end))
        return sorted(set(itertools.chain.from_iterable(met)))

    @functools.cached_property
    def _products_at(self) -> list[int]:
        return [each.at for each in self.products]

    def _products(self, within: _Within) -> list[Product]:
        found: list[Product] = []
        for start, end in within.spans:
            first = bisect.bisect_left(self._products_at, start)
            found += self.products[first : bisect.bisect_left(self._products_at, end)]
        return found


class _Within:
    """The operations of a part of a microbatch.

    Args:
        spans: from one to before another one.

    Attributes:
        spans: those, ascending; what one follows another without a gap is one.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = merged(spans)
        self._starts = [start for start, _ in self.spans]

    @property
    def end(self) -> int:
        """Behind all of them."""
        return self.spans[-1][1] if self.spans else 0

    def has(self, operation: int) -> bool:
        """Whether an operation is one of them."""
        place = bisect.bisect_right(self._starts, operation) - 1
        return place >= 0 and operation < self.spans[place][1]

    def reach(self, born: int, uses: Sequence[int]) -> tuple[int | None, int | None]:
        """Returns from which operation to before which one memory is there."""
        inside = [each for each in uses if self.has(each)]
        if self.has(born):
            later = bool(uses) and uses[-1] >= self.end
            return born, self.end if later else max([born, *inside]) + 1
        return (inside[0], inside[-1] + 1) if inside else (None, None)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Returns spans in their order; those without a gap between them are one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Returns what is left of spans without others."""
    left, taken = merged(spans), merged(others)
    found: list[Span] = []
    for start, end in left:
        for inner_start, inner_end in taken:
            if inner_end <= start or inner_start >= end:
                continue
            if inner_start > start:
                found.append((start, inner_start))
            start = max(start, inner_end)
        if start < end:
            found.append((start, end))
    return found
