"""Results that are made of tokens: each rank takes those that are its, and swaps what others have.

Where the tokens of a result go is chosen so that few travel. Those of a window on the sequence stay
where they are; where as many remain as the step has, as of a shift by one, blocks are as before,
and ranks swap the tokens that cross from one block to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import (
    BLOCKS,
    Layout,
    Window,
    cut,
    sequence_of,
)
from smdistributed.modelparallel.torch.context_parallel.tokens import Moved, Run


class Source(NamedTuple):
    """A tensor whose tokens are taken.

    Attributes:
        size: of its dim of tokens, of the whole.
        layout: how that is cut; None if every rank has the whole.
    """

    size: int
    layout: Layout | None

    def places(self, rank: int, num_ranks: int) -> torch.Tensor:
        """Returns which tokens a rank has, in their order."""
        places = torch.arange(self.size)
        if self.layout is None:
            return places
        return cut(places, Layout(0, 1, self.layout.window), rank, num_ranks)


def target(
    tokens: Moved, dim: int, sources: Sequence[Source], length: int, num_ranks: int
) -> Layout:
    """Returns how a result is cut that is made of tokens of pieces.

    Args:
        tokens: of the result.
        dim: along which they lie.
        sources: of them.
        length: of the sequences of the step.
        num_ranks: that share these.
    """
    if tokens.length == length:
        return sequence_of(dim, length, num_ranks)
    pieces = [
        run for run in tokens.runs if run.source >= 0 and sources[run.source].layout is not None
    ]
    run = max(pieces, key=lambda run: run.length)
    source = sources[run.source]
    assert source.layout is not None
    window = source.layout.window or Window(source.size, 0, source.size)
    first = sum(each.length for each in tokens.runs[: tokens.runs.index(run)])
    start = window.start + (run.start if run.step >= 0 else run.start - run.length + 1) - first
    found = Window(window.frame, start, start + tokens.length)
    beyond = max(0, -found.start) + max(0, found.stop - found.frame)
    has_most = 2 * tokens.length > source.size
    sizes = [Layout(0, 1, found).size_of(len(found), rank, num_ranks) for rank in range(num_ranks)]
    if beyond > found.frame // (BLOCKS * num_ranks) or (has_most and not min(sizes)):
        return sequence_of(dim, tokens.length, num_ranks)  # some would have most of the work
    return Layout(dim, 1, None if found == Window(len(found), 0, len(found)) else found)


@dataclass(frozen=True, eq=False)
class _Part:
    """What a rank takes of one source.

    Attributes:
        source: its number.
        own: the places of tokens that this rank has.
        sent: those that it gives others, for each one after the other; None if none is swapped.
        given: how many each rank gets.
        taken: how many each rank gives.
    """

    source: int
    own: torch.Tensor
    sent: torch.Tensor | None
    given: tuple[int, ...]
    taken: tuple[int, ...]

    def of(self, group: ContextGroup, tensor: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Returns them. Collective: CP_GROUP, if some are swapped."""
        found = [_chosen(tensor, dim, self.own)]
        if self.sent is not None:
            sent = _chosen(tensor, dim, self.sent)
            found.append(group.swap(sent, dim, self.given, self.taken))
        return found


@dataclass(frozen=True)
class Assembly:
    """Puts a result together of tokens.

    Attributes:
        tokens: that it is made of.
        dim: along which they lie.
        sources: of them.
        layout: how the result is cut; None if every rank gets the whole.
        outer: how many sequences lie one after the other along the dim.
        is_local: whether no rank has more to do than to look at a part of what it has.
    """

    tokens: Moved
    dim: int
    sources: tuple[Source, ...]
    layout: Layout | None
    outer: int
    is_local: bool
    _parts: tuple[_Part, ...] = field(compare=False, repr=False)
    _numbers: torch.Tensor = field(compare=False, repr=False)
    _order: torch.Tensor | None = field(compare=False, repr=False)

    def run(self, group: ContextGroup, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the result. Collective: CP_GROUP, if tokens are swapped."""
        dim = self.dim
        if self.outer > 1:
            tensors = [
                torch.unflatten(each, dim, (self.outer, each.shape[dim] // self.outer))
                for each in tensors
            ]
            dim += 1
        found: list[torch.Tensor] = []
        for part in self._parts:
            found += part.of(group, tensors[part.source], dim)
        if len(self._numbers):
            found.append(_own(self._numbers, found[0], dim))
        result = found[0] if len(found) == 1 else torch.cat(found, dim)
        if self._order is not None:
            result = result.index_select(dim, self._order.to(result.device))
        if self.outer > 1:
            result = result.flatten(self.dim, dim)
        return result.squeeze(dim) if self.tokens.is_one else result


def assembly(
    tokens: Moved,
    dim: int,
    sources: Sequence[Source],
    layout: Layout | None,
    group: ContextGroup,
    outer: int = 1,
) -> Assembly:
    """Returns what puts a result together; see ``Assembly``."""
    ranks = range(group.size)
    result = Source(tokens.length, layout)
    wanted = [result.places(rank, group.size) for rank in ranks]
    source_of, place_of = _origins(tokens.runs)
    parts, orders = [], []
    is_local = True
    for number in sorted({run.source for run in tokens.runs if run.source >= 0}):
        source = sources[number]
        held = [source.places(rank, group.size) for rank in ranks]
        local = [
            torch.full((source.size,), -1).index_put_((each,), torch.arange(len(each)))
            for each in held
        ]
        # The places in the result, and in the pieces, of what each rank wants of each.
        of_rank = [each[source_of[each] == number] for each in wanted]
        routes = _Routes(of_rank, [place_of[each] for each in of_rank], local)
        is_local &= all(map(routes.is_local, ranks))
        parts.append(routes.part(number, group.rank, group.size))
        orders += routes.order(group.rank)
    own = wanted[group.rank]
    numbers = torch.tensor([run.number for run in tokens.runs], dtype=torch.float64)
    counts = torch.tensor([run.length for run in tokens.runs])
    invented = own[source_of[own] < 0]
    orders.append(invented)
    placed = torch.cat(orders)
    order = None if torch.equal(placed, own) else placed.argsort()
    is_local &= len(parts) == 1 and not any(run.source < 0 for run in tokens.runs)
    return Assembly(
        *(tokens, dim, tuple(sources), layout, outer, is_local, tuple(parts)),
        numbers.repeat_interleave(counts)[invented],
        order,
    )


class _Routes(NamedTuple):
    """Where the tokens of one source go.

    Attributes:
        wanted: for each rank, the places in the result of what it wants.
        places: those in the source.
        local: for each rank, the place in its piece of each token of the source; -1 if it has none.
    """

    wanted: list[torch.Tensor]
    places: list[torch.Tensor]
    local: list[torch.Tensor]

    def is_local(self, rank: int) -> bool:
        """Whether a rank has all that it wants, one after the other."""
        own = self.local[rank][self.places[rank]]
        return bool((own >= 0).all()) and _is_range(own)

    def of(self, taker: int, giver: int) -> torch.Tensor:
        """Returns, of what a rank wants and lacks, what another one has: those in ``wanted``."""
        lacks = self.local[taker][self.places[taker]] < 0
        return lacks & (self.local[giver][self.places[taker]] >= 0)

    def part(self, source: int, rank: int, num_ranks: int) -> _Part:
        """Returns what a rank takes and gives."""
        own = self.local[rank][self.places[rank]]
        sent = [
            self.local[rank][self.places[taker][self.of(taker, rank)]] for taker in range(num_ranks)
        ]
        is_swapped = any(
            bool((self.local[each][self.places[each]] < 0).any()) for each in range(num_ranks)
        )
        return _Part(
            source,
            own[own >= 0],
            torch.cat(sent) if is_swapped else None,
            tuple(map(len, sent)),
            tuple(int(self.of(rank, giver).sum()) for giver in range(num_ranks)),
        )

    def order(self, rank: int) -> list[torch.Tensor]:
        """Returns the places in the result of what a rank takes, in the order of ``_Part.of``."""
        own = self.local[rank][self.places[rank]]
        taken = [self.wanted[rank][self.of(rank, giver)] for giver in range(len(self.local))]
        return [self.wanted[rank][own >= 0], *taken]


def _origins(runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the source of each token of a result, and its place there."""
    sources = [torch.full((run.length,), run.source) for run in runs]
    places = [run.start + run.step * torch.arange(run.length) for run in runs]
    return torch.cat(sources), torch.cat(places)


def _is_range(places: torch.Tensor) -> bool:
    return bool((places.diff() == 1).all())


def _chosen(tensor: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Returns tokens of a tensor: a look at its memory, if they lie one after the other."""
    if _is_range(places):
        return tensor.narrow(dim, int(places[0]) if len(places) else 0, len(places))
    return tensor.index_select(dim, places.to(tensor.device))


def _own(numbers: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the numbers of a call's own, as tokens."""
    shape = [1] * like.dim()
    shape[dim] = len(numbers)
    sizes = list(like.shape)
    sizes[dim] = len(numbers)
    return numbers.to(like.device, like.dtype).view(shape).expand(sizes)


def whole_tokens(length: int) -> Moved:
    """Returns the tokens of a result that is what the one source is."""
    return Moved((Run(0, 0, 1, length),), False)
