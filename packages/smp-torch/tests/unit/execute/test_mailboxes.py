"""Messages that are laid into memory, between ranks that are here in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.execute.mailboxes import Mailboxes
from smdistributed.modelparallel.torch.execute.room import Room

CPU = torch.device("cpu")


class Common:
    """The memory of all ranks, and their signals."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.parts: dict[int, list[torch.Tensor]] = {}
        self.signals: set[tuple[int, int, int, int]] = set()
        self._made = [itertools.count() for _ in range(num_ranks)]

    def maker(self, rank: int) -> Any:
        """Returns what makes memory for a rank; the same call of all gives the same."""

        def make(size_bytes: int) -> Shared:
            number = next(self._made[rank])
            if number not in self.parts:
                self.parts[number] = [
                    torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(self.num_ranks)
                ]
            return Shared(self, number, rank)

        return make


class Shared:
    """See ``SymmetricMemory``, as one rank has it."""

    num_channels = 20

    def __init__(self, common: Common, number: int, rank: int) -> None:
        self._common = common
        self._number = number
        self._rank = rank

    def piece(self, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``SymmetricMemory``."""
        part = self._common.parts[self._number][rank]
        assert start + count * dtype.itemsize <= len(part)
        return part[start : start + count * dtype.itemsize].view(dtype)

    def barrier(self) -> None:
        """See ``SymmetricMemory``."""

    def signal(self, rank: int, channel: int) -> None:
        """See ``SymmetricMemory``."""
        assert channel < self.num_channels
        signal = (self._number, self._rank, rank, channel)
        assert signal not in self._common.signals
        self._common.signals.add(signal)

    def wait(self, rank: int, channel: int) -> None:
        """See ``SymmetricMemory``."""
        self._common.signals.remove((self._number, rank, self._rank, channel))


def ranks(count: int = 2) -> list[Mailboxes]:
    common = Common(count)
    # In an order of their own in the memory, as where ranks of a pipeline are not in order.
    order = list(reversed(range(count)))
    return [Mailboxes(common.maker(order[rank]), order, rank, CPU) for rank in range(count)]


def test_messages_come_in_order_and_places_are_used_again() -> None:
    one, other = ranks()
    for each in (one, other):
        each.make_room({(0, 1): Room(2, 16), (1, 0): Room(1, 4)})
    got = []
    for turn in range(5):
        first, second = torch.full((2, 2), turn), torch.full((3,), turn, dtype=torch.float16)
        for tensor in (first.int(), second):
            assert one.send(tensor, 1).is_done
        buffers = torch.empty(2, 2, dtype=torch.int32), torch.empty(3, dtype=torch.float16)
        takings = [other.receive(buffer, 0) for buffer in buffers]
        for taking in reversed(takings):  # needed in another order than they came in
            got.append(taking.wait().flatten()[0].item())
        other.send(torch.tensor(turn, dtype=torch.float32), 0)
        assert one.receive(torch.empty(()), 1).wait() == turn
    assert got == [turn for turn in range(5) for _ in range(2)]


def test_a_full_box_is_waited_for() -> None:
    one, other = ranks()
    for each in (one, other):
        each.make_room({(0, 1): Room(1, 4)})
    one.send(torch.ones(1), 1)
    with pytest.raises(KeyError):  # where a GPU would wait
        one.send(torch.ones(1), 1)


def test_room_grows_and_nothing_else() -> None:
    one, other = ranks()
    for each in (one, other):
        each.make_room({(0, 1): Room(1, 4)})
        each.make_room({(0, 1): Room(1, 2), (1, 0): Room(3, 400)})
    assert not one.takes_to(2, torch.ones(1))
    assert one.takes_to(1, torch.ones(1))
    assert other.takes_from(0, torch.ones(1))
    assert not other.takes_from(2, torch.ones(1))
    assert not one.takes_to(1, torch.ones(1, device="meta"))
    for turn in range(6):
        other.send(torch.full((100,), float(turn)), 0)
        if turn >= 2:
            assert one.receive(torch.empty(100), 1).wait()[99] == turn - 2
    one.send(torch.ones(1), 1)
    assert other.receive(torch.empty(1), 0).wait() == 1


def test_messages_lie_in_the_memory_of_who_needs_them() -> None:
    common = Common(3)
    order = [1, 2, 0]
    members = [Mailboxes(common.maker(order[rank]), order, rank, CPU) for rank in range(3)]
    for each in members:
        each.make_room({(2, 0): Room(2, 4), (1, 0): Room(1, 4)})
    members[2].send(torch.ones(1), 0)
    members[1].send(torch.zeros(1), 0)
    assert members[0].receive(torch.empty(1), 2).wait() == 1
    assert [bool(part.any()) for part in common.parts[0]] == [False, True, False]


def test_boxes_of_an_evaluation_serve_training() -> None:
    one, other = ranks()
    with torch.inference_mode():
        for each in (one, other):
            each.make_room({(0, 1): Room(1, 8)})
    weight = torch.ones(2, requires_grad=True)
    for _ in range(2):
        one.send(torch.full((8,), 3, dtype=torch.uint8), 1)  # as the memory itself
        assert other.receive(torch.empty(8, dtype=torch.uint8), 0).wait()[7] == 3
        one.send(weight * 2, 1)
        got = other.receive(torch.empty(2), 0).wait()
        assert got.tolist() == [2, 2]
        assert not got.requires_grad
    with torch.inference_mode():
        one.send(torch.ones(2), 1)
        assert other.receive(torch.empty(2), 0).wait().tolist() == [1, 1]


def test_more_messages_than_signals_are_refused() -> None:
    (one, _) = ranks()
    with pytest.raises(UnsupportedError, match=r"At most 10 messages.*11.*SMP_COPY_ENGINE=0"):
        one.make_room({(0, 1): Room(11, 4)})
