"""Which units are whole on this rank now, and which will be needed next.

Shards are read only between the beginning of a step, or of a call outside of steps, and its end:
both are agreed on, so that no rank writes to what another one reads.

A unit is gathered when something uses one of its parameters, and stays until its memory is needed:
then the one that goes is used last, as far as the order of the last step tells. In that order units
are also gathered ahead, as many as ``sdp_max_live_parameters`` leaves room for.

Source: model-parallel-extended-features-pytorch-sharded-data-parallelism.md.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Sequence

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.sharding.agreement import Agreement, Required
from smdistributed.modelparallel.torch.sharding.parameter import WRITTEN
from smdistributed.modelparallel.torch.sharding.shard_memory import ShardMemory
from smdistributed.modelparallel.torch.sharding.side_stream import Beside, SideStream
from smdistributed.modelparallel.torch.sharding.unit import Unit

#: Units that are gathered ahead at most.
_AHEAD = 2
#: What a wish to gather ahead begins with.
_GATHER_AHEAD = 1
_NEVER = 1 << 60


class Residency:
    """The gathered units of one model.

    Args:
        shard_memory: where the shards are.
        device: where the units become whole.
        agreement: with the ranks of the sharding group.
        most_elements: that may be gathered at a time; a larger unit is gathered alone.

    Attributes:
        shard_memory: where the shards are.
        units: of the model, by number.
        owner_of: unit by what its gathered memory is known by.
        live: elements that are gathered now, or on their way.
        most_live: the most that were, since the rank started.
    """

    def __init__(
        self,
        shard_memory: ShardMemory,
        device: torch.device,
        agreement: Agreement,
        most_elements: int,
    ) -> None:
        self.shard_memory = shard_memory
        self._device = device
        self._agreement = agreement
        self._most_elements = most_elements
        self.units: list[Unit] = []
        self.owner_of: dict[int, Unit] = {}
        self.live = self.most_live = 0
        self._key_of: dict[int, int] = {}
        self._beside = SideStream()
        self._coming: dict[int, tuple[torch.Tensor, Beside]] = {}
        self._used: collections.Counter[int] = collections.Counter()
        self._latest: int | None = None
        self._is_abandoned = False
        self._order: list[int] = []
        self._expected: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._position = 0

    def begin(self) -> None:
        """Starts a step: what it uses is expected to be what the last one used.

        Collective: the sharding group.
        """
        self.empty()
        self._meet(Required.BEGIN)
        self._expected, self._order = self._order, []
        self._places = {}
        for place, number in enumerate(self._expected):
            self._places.setdefault(number, []).append(place)
        self._position = 0
        self._latest = None

    # ------------------------------------------------------------------ use

    def enter(self, numbers: Iterable[int]) -> None:
        """Makes units whole, which then stay until ``leave``."""
        wanted = list(dict.fromkeys(numbers))
        self._used.update(wanted)
        for number in wanted:
            self.need(number)

    def leave(self, numbers: Iterable[int]) -> None:
        """Lets units go when their memory is needed."""
        for number in dict.fromkeys(numbers):
            self._used[number] -= 1
            if not self._used[number]:
                del self._used[number]

    def need(self, number: int) -> torch.Tensor:
        """Returns the memory of a unit, which is whole now. Collective if it was not."""
        unit = self.units[number]
        if number == self._latest and unit.memory is not None:
            return unit.memory
        self._latest = number
        self._follow(number)
        if unit.memory is None and number not in self._coming:
            agreed = self._agreed(Required.GATHER, number, self._ahead(unit.num_elements))
            self._make_room(unit.num_elements)
            self._start(number)
            self._start_all(agreed)
        elif ahead := self._ahead(0):
            self._start_all(self._agreed(Required.NOTHING, 0, ahead))
        if number in self._coming:
            self._fill(number)
        assert unit.memory is not None
        return unit.memory

    def _fill(self, number: int) -> None:
        unit = self.units[number]
        key = unit.fill(self._arrived(number))
        self.owner_of[key], self._key_of[number] = unit, key

    def gathered(self) -> list[torch.Tensor]:
        """Returns the memory of units that are whole, or on their way."""
        whole = [unit.memory for unit in self.units if unit.memory is not None]
        return [*whole, *(memory for memory, _ in self._coming.values())]

    def settle(self) -> None:
        """Waits for what is gathered ahead."""
        for number in list(self._coming):
            self._fill(number)

    def _agreed(self, required: Required, number: int, ahead: Sequence[int]) -> Sequence[int]:
        """Returns the units that are gathered ahead, now that one is required, or nothing is."""
        if not self.shard_memory.is_common:
            return ahead
        wish = (_GATHER_AHEAD, *ahead) if ahead else ()
        return self._agreement.meet(required, number, wish)[1:]

    def _meet(self, what: Required) -> None:
        """Waits until all ranks begin or end what reads shards; on the device, too."""
        self._agreement.meet(what)
        self.meet_on_device()

    def meet_on_device(self) -> None:
        """Has what is computed from now on come after all that is computed until now, anywhere."""
        self._beside.run(self._device, self.shard_memory.barrier, ()).wait()

    def end(self) -> None:
        """Ends a step: nobody reads shards any more. Collective: the sharding group."""
        self.empty()
        self._meet(Required.END)

    def empty(self) -> None:
        """Lets all units go."""
        for number in list(self._coming):
            self._arrived(number)
        for number in list(self._key_of):
            self._empty(number)
        self.live = 0
        self._latest = None

    def abandon(self) -> None:
        """Lets all units go after an error, when nothing may be waited for."""
        for _, gathering in self._coming.values():
            gathering.abandon()
        self._coming.clear()
        self._used.clear()
        self._is_abandoned = True
        self.empty()
        self._is_abandoned = False

    def forget(self) -> None:
        """Lets all units go that were gathered in a capture, which nothing was done for."""
        self._coming.clear()
        self._used.clear()
        self._is_abandoned = True
        self.empty()
        self._is_abandoned = False
        self._order, self._position = [], 0

    def repeat_order(self) -> None:
        """Takes note that a step that was captured uses what the last one used."""
        self._order = list(self._expected)

    def _empty(self, number: int) -> None:
        del self.owner_of[self._key_of.pop(number)]
        written = self.units[number].empty()
        self.live -= self.units[number].num_elements
        if written and not self._is_abandoned:
            raise UnsupportedError(WRITTEN.format("something", ", ".join(written)))

    def _start(self, number: int) -> None:
        unit = self.units[number]
        self.live += unit.num_elements
        self.most_live = max(self.most_live, self.live)
        memory = unit.shard.new_empty(unit.num_elements)
        gather, used = self.shard_memory.gathering(unit, memory)
        self._coming[number] = memory, self._beside.run(self._device, gather, [memory, *used])

    def _arrived(self, number: int) -> torch.Tensor:
        memory, gathering = self._coming.pop(number)
        gathering.wait()
        return memory

    def _start_all(self, agreed: Sequence[int]) -> None:
        """Gathers ahead what all ranks agreed on."""
        for number in agreed:
            if self.units[number].memory is None and number not in self._coming:
                self._make_room(self.units[number].num_elements, self._next_use(number))
                self._start(number)

    # ------------------------------------------------------------------ order

    def _follow(self, number: int) -> None:
        """Notes a use, and where in the order of the last step this is."""
        self._order.append(number)
        places = self._places.get(number, [])
        following = bisect.bisect_left(places, self._position)
        if following < len(places):
            self._position = places[following] + 1

    def _next_use(self, number: int) -> int:
        places = self._places.get(number, [])
        following = bisect.bisect_left(places, self._position)
        return places[following] if following < len(places) else _NEVER

    def _ahead(self, missing: int) -> list[int]:
        """Returns the units to gather now, besides one of ``missing`` elements."""
        found: list[int] = []
        total = self.live + missing
        for number in self._expected[self._position : self._position + 2 * _AHEAD]:
            unit = self.units[number]
            if unit.memory is not None or number in self._coming or number in found:
                continue
            later = sum(
                self.units[each].num_elements for each in self._going(self._next_use(number))
            )
            total += unit.num_elements
            if len(found) == _AHEAD or total - later > self._most_elements:
                break
            found.append(number)
        return found

    def _going(self, before: int = -1) -> list[int]:
        """Returns the units that may go, the one that is needed last first.

        Args:
            before: only those that are needed after this place in the order.
        """
        free = [each for each in self._key_of if each not in self._used and each != self._latest]
        return sorted(
            (each for each in free if self._next_use(each) > before),
            key=self._next_use,
            reverse=True,
        )

    def _make_room(self, num_elements: int, before: int = -1) -> None:
        for number in self._going(before):
            if self.live + num_elements <= self._most_elements:
                return
            self._empty(number)
