"""Gradients of sharded parameters: sums over the ranks, of which each rank keeps its blocks.

In each backward pass a parameter's gradient is taken when autograd has it, and goes to the ranks
that have its blocks: once enough elements of complete units have come together, at most
``sdp_reduce_bucket_size``, and the rest when the pass ends. Blocks are summed in fp32, over ranks
and over microbatches; at the end of a step they are averaged with those of other sharding groups.

Source: model-parallel-extended-features-pytorch-sharded-data-parallelism.md.
"""

from __future__ import annotations

import collections
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.sharding.accumulation import Accumulation
from smdistributed.modelparallel.torch.sharding.agreement import Agreement, Required
from smdistributed.modelparallel.torch.sharding.messages import Message
from smdistributed.modelparallel.torch.sharding.row_sums import RowSums
from smdistributed.modelparallel.torch.sharding.side_stream import Beside, SideStream
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import Unit
from smdistributed.modelparallel.torch.tensors.sparse_rows import rows_of, rows_of_all

#: Reductions whose memory is kept while later gradients are computed, at most.
_MOST_STARTED = 1
#: Elements of complete units that are worth a message: of half precision, the links of a host are
#: busy for a millisecond with as many. More would only keep more memory.
_ENOUGH = 1 << 26
#: Numbers from one square to the next.
_APART = 64
#: What a wish to reduce complete units begins with.
_REDUCE = 2
_BITS = 32


class SoFar(NamedTuple):
    """What the backward passes of a step have given until some microbatch, all of it reduced.

    Attributes:
        sums: by number of the unit. Shape of each: (width,).
        squares: of large sums, by numbers of the unit and of the parameter.
        used: numbers of units and parameters that have gradients.
        has_gradients: whether this rank was given one.
    """

    sums: dict[int, torch.Tensor]
    squares: dict[tuple[int, int], torch.Tensor]
    used: frozenset[tuple[int, int]]
    has_gradients: bool


class ShardedViews:
    """The gradients of the sharded parameters of one model.

    Args:
        groups: who exchanges.
        row_sums: sums over the ranks of the sharding group.
        agreement: with the ranks of the sharding group.
        units: of the model, by number; they are there when the first gradient comes.
        bucket_elements: that travel in one message.
        overlapping: reduce before a backward pass ends.
        accumulation: over how many steps gradients are summed.
        num_copies: of the model, and of its slices, over which gradients are averaged.
        has_begun: called before the first gradient of a backward pass.

    Attributes:
        has_gradients: whether the step in progress has given this rank a gradient.
    """

    def __init__(
        self,
        groups: ShardingGroups,
        row_sums: RowSums,
        agreement: Agreement,
        units: list[Unit],
        *,
        bucket_elements: int,
        overlapping: bool,
        accumulation: Accumulation,
        num_copies: tuple[int, int],
        has_begun: Callable[[], object],
    ) -> None:
        self._groups = groups
        self._row_sums = row_sums
        self._agreement = agreement
        self._units = units
        self._message_elements = min(bucket_elements, _ENOUGH)
        self._overlapping = overlapping
        self._accumulation = accumulation
        self._steps_done = 0
        self._num_copies = num_copies
        self._has_begun = has_begun
        self._pending: dict[int, dict[int, torch.Tensor]] = {}
        self._complete: list[int] = []
        self._is_common = True
        self._beside = SideStream()
        self._started: collections.deque[Beside] = collections.deque()
        self._sums: dict[int, torch.Tensor] = {}
        #: The sums of squares of large sums, by numbers of the unit and of the parameter.
        self._squares: dict[tuple[int, int], torch.Tensor] = {}
        self._used: set[tuple[int, int]] = set()
        #: Those with dense gradients, and which rows sparse ones have.
        self._dense: set[tuple[int, int]] = set()
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._watched: set[Any] = set()
        self.has_gradients = False

    def memory(self) -> list[torch.Tensor]:
        """Returns the sums of this rank, and whole gradients that have not been reduced."""
        pending = [each for places in self._pending.values() for each in places.values()]
        return [*self._sums.values(), *pending]

    def watch(self) -> None:
        """Has autograd call for each parameter that gets gradients, also one that was set free."""
        this = weakref.ref(self)

        def note(parameter: Any) -> None:
            gradients = this()
            if gradients is not None:
                gradients._take(parameter)

        with past_subclass_functions():
            for parameter in (each for unit in self._units for each in unit.parameters):
                if parameter.requires_grad and parameter not in self._watched:
                    self._watched.add(parameter)
                    parameter.register_post_accumulate_grad_hook(note)

    def begin(self) -> None:
        """Starts a step, or a call outside of steps."""
        self.watch()
        self._settle()
        self.has_gradients = False
        self._pending.clear()
        self._complete.clear()

    @property
    def so_far(self) -> SoFar:
        """What there is when a backward pass has ended."""
        return SoFar(
            dict(self._sums), dict(self._squares), frozenset(self._used), self.has_gradients
        )

    def resume(self, so_far: SoFar) -> None:
        """Goes on from what there was at a time; who captured it has the memory written anew."""
        self._sums, self._squares = dict(so_far.sums), dict(so_far.squares)
        self._used, self.has_gradients = set(so_far.used), so_far.has_gradients
        self._dense = set(self._used) - self._rows.keys()

    def forget(self) -> None:
        """Forgets what the step in progress has given."""
        self._pending.clear()
        self._complete.clear()
        self._started.clear()
        self._is_common = True
        self._rows.clear()
        self.resume(SoFar({}, {}, frozenset(), has_gradients=False))

    @property
    def adds_steps_up(self) -> bool:
        """Whether several steps are summed, or there are sums or gradients of an earlier one."""
        shards = (shard for unit in self._units for shard in unit.shards)
        return (
            self._accumulation.is_over_several
            or bool(self._sums)
            or any(each.gradient is not None for each in shards)
        )

    # ------------------------------------------------------------------ one backward pass

    @torch.no_grad()
    def _take(self, parameter: Any) -> None:
        """Called by autograd after it has made a gradient."""
        shard = parameter.shard
        with past_subclass_functions():
            gradient = parameter.grad
            parameter.grad = None
        self._has_begun()
        self.has_gradients = True
        self._used.add((shard.unit, shard.place))
        if gradient.layout is torch.strided:
            self._dense.add((shard.unit, shard.place))
        else:
            self._agreement.check_not_captured(f"the gradient of {shard.name} is sparse")
            rows = rows_of(gradient, shard.name)
            self._rows[shard.unit, shard.place] = rows | self._rows.get(
                (shard.unit, shard.place), rows
            )
            gradient = gradient.to_dense()
        pending = self._pending.setdefault(shard.unit, {})
        earlier = pending.get(shard.place)
        pending[shard.place] = gradient if earlier is None else earlier + gradient
        unit = self._units[shard.unit]
        if len(pending) == sum(each.requires_grad for each in unit.parameters):
            if shard.unit not in self._complete:
                self._complete.append(shard.unit)
            self._reduce_early()

    def _reduce_early(self) -> None:
        size = sum(self._units[number].num_elements for number in self._complete)
        if not self._overlapping or not self._is_common or size < self._message_elements:
            return
        wish = (_REDUCE, len(self._complete), zlib.crc32(repr(self._complete).encode()))
        if self._agreement.meet(Required.NOTHING, 0, wish) == wish:
            self._reduce(self._complete)
            self._complete = []
        else:
            self._is_common = False  # the ranks differ: what they have is reduced at the end

    def end_pass(self) -> None:
        """Ends a backward pass. Collective: the sharding group."""
        self._agreement.meet(Required.END_OF_PASS)
        here = [number in self._pending for number in range(len(self._units))]
        everyone = self._agreement.compare(list(_packed(here)))
        anywhere = [
            number
            for number in range(len(self._units))
            if any(words[number // _BITS] >> number % _BITS & 1 for words in everyone)
        ]
        self._reduce(anywhere)
        self._complete = []
        self._is_common = True
        self._settle()

    @torch.no_grad()
    def _reduce(self, numbers: Sequence[int]) -> None:
        """Adds the pending gradients of some units to the sums. Collective: sharding group."""
        for message in self._messages(numbers):
            units = [self._units[number] for number in message]
            gradients = [self._pending.pop(number, {}) for number in message]
            copies = self._num_copies[units[0].is_sliced]
            self._start(Message(units, gradients, copies if _divides_exactly(copies) else 1))

    def _start(self, message: Message) -> None:
        """Adds a message to the sums, beside what is computed. Collective: the sharding group."""
        if not message.width:
            return
        wide = torch.promote_types(message.dtype, torch.float32)
        total = torch.empty(message.width, dtype=wide, device=message.device)
        squares = self._squares_for(message, total)
        sum_up = self._row_sums.summing(message, total, squares)

        def add() -> None:
            sum_up()
            self._add(message, total, squares)

        used = [total, *message.tensors, *([] if squares is None else [squares])]
        self._started.append(self._beside.run(message.device, add, used))
        self._settle(_MOST_STARTED)

    def _settle(self, most_started: int = 0) -> None:
        while len(self._started) > most_started:
            self._started.popleft().wait()

    def _squares_for(self, message: Message, total: torch.Tensor) -> torch.Tensor | None:
        """Returns what takes the squares of sums, if these are the gradients of a step."""
        unit = message.units[0]
        are_means = _divides_exactly(self._num_copies[unit.is_sliced])
        if total.is_complex() or not are_means or self._copies_of(unit) is not None:
            return None
        # Each begins where the compiler's kernels take it as it is.
        return total.new_empty((len(message.names_of(self._groups.index)), _APART))[:, 0]

    def _copies_of(self, unit: Unit) -> dist.ProcessGroup | None:
        return self._groups.copies_of_slices if unit.is_sliced else self._groups.copies

    def _add(self, message: Message, total: torch.Tensor, squares: torch.Tensor | None) -> None:
        """Adds what this rank got of a message.

        Args:
            message: as it was sent.
            total: the sums. Shape: (width,).
            squares: of each parcel. Shape: (parcels,).
        """
        if squares is not None:
            for names, square in zip(message.names_of(self._groups.index), squares, strict=True):
                for name in names:
                    self._squares.pop(name, None)
                    if len(names) == 1 and name[0] not in self._sums:
                        self._squares[name] = square
        for unit, part in zip(message.units, torch.split(total, message.widths), strict=True):
            if unit.number in self._sums:
                self._sums[unit.number] += part
            else:
                self._sums[unit.number] = part

    def _messages(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yields units of one kind that fit one message; a larger one alone."""
        message: list[int] = []
        size = 0
        for number in numbers:
            unit = self._units[number]
            is_other = bool(message) and _kind(self._units[message[0]]) != _kind(unit)
            if message and (is_other or size + unit.num_elements > self._message_elements):
                yield message
                message, size = [], 0
            message.append(number)
            size += unit.num_elements
        if message:
            yield message

    # ------------------------------------------------------------------ the end of a step

    @torch.no_grad()
    def end_step(self, used_anywhere: Callable[[torch.Tensor], None]) -> None:
        """Ends a step with a backward pass: blocks get the means over all replicas.

        Collective: DP_GROUP, where an accumulation ends.

        Args:
            used_anywhere: takes the largest of each flag over the data-parallel ranks.
        """
        if self._accumulation.ends_after(self._steps_done):
            self._steps_done = 0
            self._finish_all(used_anywhere)
        else:
            self._steps_done += 1

    @property
    def is_accumulating(self) -> bool:
        """Whether there are sums that are no gradients yet."""
        return self._steps_done > 0

    def complete(self, used_anywhere: Callable[[torch.Tensor], None]) -> None:
        """Makes gradients of what steps have added up that nobody has reduced.

        Collective: DP_GROUP, if there is any.

        Args:
            used_anywhere: takes the largest of each flag over the data-parallel ranks.
        """
        if self._steps_done:
            self._steps_done = 0
            self._finish_all(used_anywhere)

    def restart_accumulation(self) -> None:
        """Forgets what has been added up, on all ranks alike."""
        self._steps_done = 0
        self._clear()

    def _clear(self) -> None:
        for each in (self._sums, self._squares, self._used, self._dense, self._rows):
            each.clear()

    @torch.no_grad()
    def _finish_all(self, used_anywhere: Callable[[torch.Tensor], None]) -> None:
        places = [(unit.number, place) for unit in self._units for place in range(len(unit.names))]
        # On the host, so that no GPU is waited for.
        flags = torch.tensor(
            [place in kind for kind in (self._used, self._dense) for place in places],
            dtype=torch.uint8,
            device="cpu",
        )
        used_anywhere(flags)
        anywhere, dense = flags.view(2, -1).tolist()
        used = {place for place, flag in zip(places, anywhere, strict=True) if flag}
        sizes = {
            place: self._units[place[0]].shards[place[1]].shape[0]
            for place, flag in zip(places, dense, strict=True)
            if place in used and not flag
        }
        self._rows = rows_of_all(sizes, self._rows, used_anywhere)
        for number, group in itertools.groupby(sorted(used), key=lambda place: place[0]):
            self._finish(self._units[number], [place for _, place in group])
        self._clear()

    def _finish(self, unit: Unit, places: Sequence[int]) -> None:
        wide = torch.promote_types(unit.dtype, torch.float32)
        sums = self._sums.get(unit.number)
        if sums is None:
            sums = torch.zeros_like(unit.shard, dtype=wide)
        copies = self._copies_of(unit)
        if copies is not None:
            with self._groups.blaming("reducing gradients with"):
                dist.all_reduce(sums, group=copies)
        num_copies = self._num_copies[unit.is_sliced]
        if not _divides_exactly(num_copies):
            sums.div_(num_copies)
        blocks = unit.blocks_of(sums)
        for place in places:
            shard = unit.shards[place]
            rows, earlier = self._rows.get((unit.number, place)), shard.rows
            if shard.gradient is None:
                shard.gradient, shard.rows = blocks[place], rows
                square = self._squares.get((unit.number, place))
                if square is not None:
                    shard.know_square(square)
            else:
                shard.gradient.add_(blocks[place])
                shard.rows = None if rows is None or earlier is None else rows | earlier


def _kind(unit: Unit) -> tuple[torch.dtype, bool]:
    return unit.dtype, unit.is_sliced


def _divides_exactly(number: int) -> bool:
    """Whether a sum's terms may be divided before they are added: by powers of two."""
    return number & (number - 1) == 0


def _packed(flags: Sequence[bool]) -> Iterator[int]:
    """Yields flags as numbers, of which each has some."""
    for start in range(0, len(flags), _BITS):
        part = flags[start : start + _BITS]
        yield sum(1 << place for place, flag in enumerate(part) if flag)
