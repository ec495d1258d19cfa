"""Messages that are laid into the memory of the rank which needs them: between GPUs of one host.

Copies hold no multiprocessor, and need nobody at the other end: a message is there when it is
needed, however late that is asked for. A rank has a box for each rank that sends to it, with as
many places as messages can wait in it; they are filled and emptied in turn. Who has filled a
place signals it, and so does who has emptied it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.collectives.symmetric_memory import (
    MakeMemory,
    SymmetricMemory,
)
from smdistributed.modelparallel.torch.execute.room import Room, Rooms

#: Of where a place begins, in bytes.
_ALIGNMENT = 256


@dataclass
class _Box:
    """Where messages from one rank to another lie.

    Attributes:
        peer: the other one's number in the memory.
        places: the memory of each; its number is the channel of the signal that it is full.
        emptied: the channel of the signal that the first is empty again; those of others follow.
        stream: of the sender, on which it fills places; None on a CPU.
        turn: how many messages there have been.
    """

    peer: int
    places: list[torch.Tensor]
    emptied: int
    stream: torch.cuda.Stream | None
    turn: int = 0

    def next(self) -> tuple[int, bool]:
        """Returns the place of the next message, and whether it has been used before."""
        turn, self.turn = self.turn, self.turn + 1
        return turn % len(self.places), turn >= len(self.places)


class Mailboxes:
    """The boxes of the ranks of one pipeline.

    Args:
        make: makes memory that they share.
        rank_of: for each pp_rank, its number in the memory.
        pp_rank: of this process.
        device: where the memory is.
    """

    def __init__(
        self,
        make: MakeMemory,
        rank_of: Sequence[int],
        pp_rank: int,
        device: torch.device,
    ) -> None:
        self._make = make
        self._rank_of = rank_of
        self._pp_rank = pp_rank
        self._device = device
        self._rooms: dict[tuple[int, int], Room] = {}
        self._memory: SymmetricMemory
        #: By the other pp_rank.
        self._outgoing: dict[int, _Box] = {}
        self._incoming: dict[int, _Box] = {}

    def make_room(self, rooms: Rooms) -> None:
        """Makes boxes in which the messages of a mini-batch find room. Collective: the pipeline.

        Args:
            rooms: the same on every rank.
        """
        larger = dict(self._rooms)
        for way, room in rooms.items():
            former = larger.get(way, Room(0, 0))
            larger[way] = Room(*map(max, former, room))
        if larger == self._rooms:
            return
        self._rooms = larger
        # Others have nothing more to read or to write in what is given up here, once all that
        # this rank sends has been laid down, and all that it receives been taken.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._outgoing.clear()
        self._incoming.clear()
        starts: dict[tuple[int, int], int] = {}
        ends = [0] * len(self._rank_of)
        for way, room in sorted(larger.items()):
            starts[way] = ends[way[1]]
            ends[way[1]] += room.places * _aligned(room.num_bytes)
        self._memory = self._make(max(_ALIGNMENT, *ends))
        most = max(room.places for room in larger.values())
        if 2 * most > self._memory.num_channels:
            raise UnsupportedError(
                f"At most {self._memory.num_channels // 2} messages from one rank to another can "
                f"wait in its memory; this schedule has {most}: use fewer microbatches, or set "
                "SMP_COPY_ENGINE=0, which has ranks send by NCCL."
            )
        for (source, target), room in larger.items():
            if self._pp_rank not in (source, target):
                continue
            size = _aligned(room.num_bytes)
            start = starts[source, target]
            places = [
                self._memory.piece(self._rank_of[target], start + place * size, size, torch.uint8)
                for place in range(room.places)
            ]
            if source == self._pp_rank:
                box = _Box(self._rank_of[target], places, most, self._new_stream())
                self._outgoing[target] = box
            else:
                self._incoming[source] = _Box(self._rank_of[source], places, most, None)

    def _new_stream(self) -> torch.cuda.Stream | None:
        if self._device.type == "cpu":
            return None
        stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self._device, priority=-1
        )
        return stream

    def takes_to(self, target: int, tensor: torch.Tensor) -> bool:
        """Whether a message to a pp_rank goes this way; it has the same answer."""
        return target in self._outgoing and tensor.device == self._device

    def takes_from(self, source: int, tensor: torch.Tensor) -> bool:
        """Whether a message from a pp_rank comes this way; it has the same answer."""
        return source in self._incoming and tensor.device == self._device

    def send(self, tensor: torch.Tensor, target: int) -> Laying:
        """Starts laying a message into the box of a pp_rank.

        Args:
            tensor: contiguous.
            target: who gets it.
        """
        box = self._outgoing[target]
        place, is_used = box.next()
        if box.stream is None:
            return self._lay(tensor, box, place, is_used)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(box.stream):
            return self._lay(tensor, box, place, is_used, computing)

    def _lay(
        self,
        tensor: torch.Tensor,
        box: _Box,
        place: int,
        is_used: bool,
        computing: torch.cuda.Stream | None = None,
    ) -> Laying:
        if is_used:
            # Before the stream waits for the tensor: this one is seldom waited for.
            self._memory.wait(box.peer, box.emptied + place)
        if box.stream is not None and computing is not None:
            box.stream.wait_stream(computing)
        _seen_as(box.places[place], tensor).copy_(tensor)
        self._memory.signal(box.peer, place)
        return Laying(tensor, None if box.stream is None else box.stream.record_event())

    def receive(self, tensor: torch.Tensor, source: int) -> Taking:
        """Returns what takes the next message of a pp_rank out of its box, when it is needed.

        Args:
            tensor: takes it; contiguous.
            source: who sends it.
        """
        return Taking(self._memory, self._incoming[source], tensor)


class Laying:
    """A message that is laid down; keeps its tensor until it is."""

    __slots__ = ("_done", "tensor")

    def __init__(self, tensor: torch.Tensor, done: torch.cuda.Event | None) -> None:
        self.tensor = tensor
        self._done = done

    @property
    def is_done(self) -> bool:
        """Whether it has been laid down; never waits."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """Makes the tensor free to be written, on the current stream."""
        if self._done is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self._done)
        return self.tensor


class Taking:
    """A message that comes."""

    __slots__ = ("_box", "_memory", "_place", "tensor")

    def __init__(self, memory: SymmetricMemory, box: _Box, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._memory = memory
        self._box = box
        self._place, _ = box.next()

    def wait(self) -> torch.Tensor:
        """Has the tensor filled, on the current stream."""
        box, place = self._box, self._place
        self._memory.wait(box.peer, place)
        self.tensor.copy_(_seen_as(box.places[place], self.tensor))
        self._memory.signal(box.peer, box.emptied + place)
        return self.tensor


def _seen_as(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    num_bytes = tensor.numel() * tensor.dtype.itemsize
    return place[:num_bytes].view(tensor.dtype).view(tensor.shape)


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
