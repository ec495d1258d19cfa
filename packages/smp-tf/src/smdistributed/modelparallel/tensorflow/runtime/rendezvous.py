"""Where the processes of a pipeline wait for each other, they answer what others ask.

All of them run the same script, but some may read a value that the others do not: a log that the
first process writes. What they must do together (step functions, saving, barriers) is a point to
which each comes. There each says where it is and which values it needs; who has them gives them,
and whoever has all goes on. So nobody waits for a line that the others never come to, and processes
at different points that can never meet learn it at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.comm.transport import FAREWELL_SECONDS
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.parameters.moments import Moments
from smdistributed.modelparallel.tensorflow.parameters.owners import Owner
from smdistributed.modelparallel.tensorflow.runtime.script import line_of_script

_PURPOSE = "what the processes of a pipeline do next"
_END = "the end"
_MOST_KEPT = 1000
_NONE, _SHORT, _LONG = range(3)


class NotGivenError(CommError):
    """A process asks for a value that no other one has, or will have."""


@dataclass(frozen=True)
class _Stop:
    """Where a process is.

    Attributes:
        place: in words; processes with one place are at the same point.
        line: of the script.
        reads: whether it goes on as soon as it has what it asks for; else with all others.
        since: the first moment of which values are known here.
        now: the present moment.
        patience: where nobody goes on, those with the least give up, and the others wait for what
            these do then.
        own: the values that are read here, by place, of those that this process has.
        asked: who has the others, by place.
    """

    place: str
    line: str
    reads: bool
    since: int
    now: int
    patience: int
    own: dict[int, Any]
    asked: dict[int, Owner]

    def is_at(self, other: _Stop) -> bool:
        """Tells whether another process is at this point, with variables as they are here."""
        return (self.place, self.now) == (other.place, other.now)

    @property
    def described(self) -> str:
        """Where it is, in words."""
        return "ended" if self.place == _END else f"come to {self.place} ({self.line})"

    def gives(self, asked: Owner) -> bool:
        """Tells whether this process knows a value that another one asks for."""
        # One that waits here for others comes to no earlier moment any more.
        is_past = not self.reads or asked.moment <= self.now
        return asked.number is not None and self.since <= asked.moment and is_past


class Rendezvous:
    """The points at which the processes of a pipeline come together.

    Args:
        communicator: of this process.
        members: global ranks of the pipeline, by partition.
        partition: of this process.
        moments: of the variables.
    """

    def __init__(
        self,
        communicator: Communicator,
        members: Sequence[int],
        partition: int,
        moments: Moments,
    ) -> None:
        self._communicator = communicator
        self._members = members
        self._partition = partition
        self._moments = moments
        self._numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._num_numbered = 0
        self._keepers: weakref.WeakSet[Any] = weakref.WeakSet()
        #: What the script of this process may have let go of since all came together.
        self._alive: list[Any] = []
        self._is_inside = False
        #: How often each line was read since all came together.
        self._times: Counter[str] = Counter()
        #: What was read then that others had not come to, by place and moment.
        self._kept: dict[tuple[str, int], dict[int, Any]] = {}

    def new_number(self) -> int:
        """Returns another number for what all processes make together, the same in each."""
        self._num_numbered += 1
        return self._num_numbered

    def number(self, variable: Any, keeper: Any) -> int:
        """Gives a variable a number, by which others can ask for its value; returns it.

        Args:
            variable: that all processes number in one order.
            keeper: has it, as long as the script needs it.
        """
        number = self.new_number()
        self._numbered[number] = variable
        self._keepers.add(keeper)
        return number

    def read(
        self,
        place: str,
        own: dict[int, Any],
        asked: dict[int, Owner],
        can_compute: bool = False,
    ) -> dict[int, Any]:
        """Returns values, by place: those of this process, and what it asks others for.

        Collective: as ``arrive``, but the others may be at other points.

        Args:
            place: the line that reads them.
            own: values that this process has.
            asked: who has what it needs besides.
            can_compute: whether it can do without what others have not computed.

        Raises:
            NotGivenError: nobody has or will have one of them.
        """
        self._times[place] += 1
        is_computed = any(each.number is None for each in asked.values())
        patience = _LONG if not is_computed else _NONE if can_compute else _SHORT
        stop = self._stop(f"{place}, time {self._times[place]}", own, asked, patience, reads=True)
        while True:
            stops, found = self._meet(stop)
            mine = found[self._partition]
            if len(mine) == len(asked):
                if not all(stop.is_at(each) for each in stops):
                    self._keep(stop)
                return own | mine
            if not _someone_goes_on(stops, found) and stop.patience == _least(stops, found):
                self._refuse_reading(stops, mine)

    def arrive(self, place: str) -> None:
        """Waits until all processes are at a point, and begins another moment.

        Collective: the pipeline.

        Args:
            place: the point.

        Raises:
            CommError: others are at another one.
        """
        stops = self._waited(place)
        if any(each.place != place for each in stops):
            places = zip(self._members, stops, strict=True)
            raise CommError(
                "the processes of a pipeline come to what they do together in one order; "
                f"{self._described(stops)}: call step functions, and all that is for every "
                "process, outside of conditions on the rank.",
                rank=self._members[self._partition],
                missing_ranks=[rank for rank, each in places if each.place == _END],
            )
        self._moments.forget(max(each.now for each in stops))
        self._times.clear()
        self._kept.clear()
        self._alive.clear()
        self._alive.extend(self._keepers)

    def leave(self) -> None:
        """Gives others what they still read, before this process ends. Collective: the pipeline.

        Those that do something else, or nothing for too long, learn that this one has ended.
        """
        with contextlib.suppress(CommError):
            self._waited(_END, FAREWELL_SECONDS)

    def _waited(self, place: str, timeout_seconds: float | None = None) -> list[_Stop]:
        """Returns where all processes are when none reads any more."""
        stop = self._stop(place, {}, {}, _LONG, reads=False)
        while True:
            stops, _ = self._meet(stop, timeout_seconds)
            if not any(each.reads for each in stops):
                return stops

    def before_call(self, call: str, ranks: Sequence[int]) -> None:
        """Arrives at an exchange of objects that all processes of the pipeline take part in.

        Args:
            call: the exchange.
            ranks: all that take part.
        """
        if not self._is_inside and set(ranks) >= set(self._members):
            self.arrive(call)

    def _stop(
        self,
        place: str,
        own: dict[int, Any],
        asked: dict[int, Owner],
        patience: int,
        *,
        reads: bool,
    ) -> _Stop:
        since, now = self._moments.since, self._moments.now
        return _Stop(place, line_of_script(), reads, since, now, patience, own, asked)

    def _meet(
        self, stop: _Stop, timeout_seconds: float | None = None
    ) -> tuple[list[_Stop], list[dict[int, Any]]]:
        """Returns where all processes are, and for each the values that it has been given."""
        stops: list[_Stop] = self._exchanged(stop, timeout_seconds)
        found = [_of_same_line(stops, each) for each in stops]
        if any(len(known) < len(each.asked) for each, known in zip(stops, found, strict=True)):
            for answers in self._exchanged(self._answers(stop, stops, found)):
                for (partition, place), value in answers.items():
                    found[partition][place] = value
        return stops, found

    def _answers(
        self, stop: _Stop, stops: Sequence[_Stop], found: Sequence[Collection[int]]
    ) -> dict[tuple[int, int], Any]:
        """Returns what this process knows of what others ask for, by partition and place."""
        given = {}
        for partition, (each, known) in enumerate(zip(stops, found, strict=True)):
            kept = self._kept.get((each.place, each.now), {})
            for place, asked in each.asked.items():
                if place in known or asked.partition != self._partition:
                    continue
                if place in kept:
                    given[partition, place] = kept[place]
                elif stop.gives(asked):
                    given[partition, place] = self._value_of(asked)
        return given

    def _value_of(self, asked: Owner) -> Any:
        number = asked.number or 0
        former = self._moments.former(number, asked.moment)
        with tf.init_scope(), unnoted():
            return (self._numbered[number] if former is None else former).numpy()

    def _keep(self, stop: _Stop) -> None:
        """Keeps what this process has read for those that come to the line later."""
        if stop.own:
            self._kept[stop.place, stop.now] = stop.own
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]

    def _exchanged(self, own: Any, timeout_seconds: float | None = None) -> list[Any]:
        self._is_inside = True
        try:
            return self._communicator.allgather(own, CommGroup.PP_GROUP, _PURPOSE, timeout_seconds)
        finally:
            self._is_inside = False

    def _refuse_reading(self, stops: Sequence[_Stop], found: Collection[int]) -> None:
        own = stops[self._partition]
        asked = next(each for place, each in own.asked.items() if place not in found)
        owner, there = self._members[asked.partition], stops[asked.partition]
        rank = self._members[self._partition]
        if asked.number is None:
            what = f"a value that is computed of {asked.name}"
            remedy = (
                "compute it on every process, outside of conditions on the rank; or read the "
                "variables themselves, which a process may do alone, and compute with NumPy."
            )
        else:
            what = f"what {asked.name} was before it was changed"
            remedy = "read it before, or on every process, outside of conditions on the rank."
        raise NotGivenError(
            f"rank {rank} alone reads {what} ({own.line}), which rank {owner} has, and which has "
            f"{there.described}: {remedy}",
            rank=rank,
        )

    def _described(self, stops: Sequence[_Stop]) -> str:
        return ", ".join(
            f"rank {rank} has {each.described}"
            for rank, each in zip(self._members, stops, strict=True)
        )


def _of_same_line(stops: Sequence[_Stop], stop: _Stop) -> dict[int, Any]:
    """Returns what a process is given by those who read the same."""
    return {
        place: stops[asked.partition].own[place]
        for place, asked in stop.asked.items()
        if stops[asked.partition].is_at(stop) and place in stops[asked.partition].own
    }


def _least(stops: Sequence[_Stop], found: Sequence[Collection[int]]) -> int:
    """Returns the patience of those that have waited in vain."""
    pairs = zip(stops, found, strict=True)
    return min(each.patience for each, given in pairs if len(given) < len(each.asked))


def _someone_goes_on(stops: Sequence[_Stop], found: Sequence[Collection[int]]) -> bool:
    return any(
        each.reads and len(given) == len(each.asked)
        for each, given in zip(stops, found, strict=True)
    )
