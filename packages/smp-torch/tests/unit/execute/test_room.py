"""Room for messages is enough in whatever order ranks get on, and there is none too much."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.room import Room, rooms_of

#: Of the ranks that can get on, the one that does.
Choose = Callable[[list[int]], int]


@dataclass
class Job:
    """What ranks do, made up by chance.

    Attributes:
        needs: for each rank and action, what it needs.
        sends: likewise, what leaves after it.
        num_bytes: of each message.
    """

    needs: list[list[list[Message]]]
    sends: list[list[list[Message]]]
    num_bytes: dict[Message, int] = field(default_factory=dict)

    @classmethod
    def drawn(cls, dice: random.Random) -> Job:
        size = dice.randint(2, 5)
        order = [dice.randrange(size) for _ in range(dice.randint(10, 60))]
        order += range(size)  # each has a last action, which may take what is left
        job = cls([[] for _ in range(size)], [[] for _ in range(size)])
        open_messages: list[list[Message]] = [[] for _ in range(size)]
        last = len(order) - size
        for number, rank in enumerate(order):
            waiting = open_messages[rank]
            dice.shuffle(waiting)
            taken = len(waiting) if number >= last else dice.randint(0, len(waiting))
            job.needs[rank].append([waiting.pop() for _ in range(taken)])
            sent = []
            for _ in range(dice.randint(0, 2) if number < last else 0):
                target = (rank + dice.randint(1, size - 1)) % size
                message = Message(Kind.FORWARD, len(job.num_bytes), number, rank, target)
                job.num_bytes[message] = dice.randint(0, 9)
                open_messages[target].append(message)
                sent.append(message)
            job.sends[rank].append(sent)
        return job

    def run(
        self, choose: Choose, places: Mapping[tuple[int, int], int] | None = None
    ) -> Iterator[tuple[tuple[int, int], int]]:
        """Has the ranks get on; gives, at each send, the pair, and how far back the oldest is.

        Args:
            choose: who does.
            places: for messages of a pair of ranks; where all are taken, the sender waits.
        """
        programs: list[list[Any]] = [
            [step for need, leaving in zip(*both, strict=True) for step in (need, *leaving)]
            for both in zip(self.needs, self.sends, strict=True)
        ]
        at = [0] * len(programs)
        sent: dict[tuple[int, int], list[Message]] = {}
        laid: set[Message] = set()
        used: set[Message] = set()

        def waiting(way: tuple[int, int]) -> int:
            former = sent.setdefault(way, [])
            return next((len(former) - i for i, m in enumerate(former) if m not in used), 0)

        def is_possible(step: Any) -> bool:
            if isinstance(step, Message):
                way = step.source, step.target
                return places is None or waiting(way) < places[way]
            return laid.issuperset(step)

        while ready := [
            rank
            for rank, program in enumerate(programs)
            if at[rank] < len(program) and is_possible(program[at[rank]])
        ]:
            rank = choose(ready)
            step = programs[rank][at[rank]]
            at[rank] += 1
            if isinstance(step, Message):
                way = step.source, step.target
                sent.setdefault(way, []).append(step)
                laid.add(step)
                yield way, waiting(way)
            else:
                used.update(step)
        assert at == [len(program) for program in programs]


def last_of_all(late: int) -> Choose:
    """Has a rank get on when nobody else can."""
    return lambda ready: next((rank for rank in ready if rank != late), late)


@pytest.mark.parametrize("seed", range(60))
def test_room_is_what_may_be_needed(seed: int) -> None:
    dice = random.Random(seed)
    job = Job.drawn(dice)
    rooms = rooms_of(job.needs, job.sends, job.num_bytes, few=1000)
    most: dict[tuple[int, int], int] = {}
    for late in range(len(job.needs)):
        for way, count in job.run(last_of_all(late)):
            if way[1] == late:
                most[way] = max(most.get(way, 0), count)
    assert {way: room.places for way, room in rooms.items()} == most
    for _ in range(10):
        for way, count in job.run(dice.choice):
            assert count <= rooms[way].places
    largest: dict[tuple[int, int], int] = {}
    for message, num_bytes in job.num_bytes.items():
        way = message.source, message.target
        largest[way] = max(largest.get(way, 0), num_bytes)
    assert {way: room.num_bytes for way, room in rooms.items()} == largest


@pytest.mark.parametrize("seed", range(60))
def test_all_get_on_with_few_places(seed: int) -> None:
    dice = random.Random(seed)
    job = Job.drawn(dice)
    for few in (1, 2, 3):
        rooms = rooms_of(job.needs, job.sends, job.num_bytes, few)
        places = {way: room.places for way, room in rooms.items()}
        for choose in (dice.choice, *map(last_of_all, range(len(job.needs)))):
            for way, count in job.run(choose, places):
                assert count <= places[way]


def test_places_are_added_where_ranks_would_wait_for_each_other() -> None:
    # Each sends two before it takes one.
    there = [Message(Kind.FORWARD, 0, m, 0, 1) for m in range(2)]
    back = [Message(Kind.FORWARD, 1, m, 1, 0) for m in range(2)]
    sizes = dict.fromkeys([*there, *back], 4)
    rooms = rooms_of([[[], back], [[], there]], [[there, []], [back, []]], sizes, few=1)
    assert rooms == {(0, 1): Room(2, 4), (1, 0): Room(2, 4)}


def test_without_an_answer_few_places_are_enough() -> None:
    there = [Message(Kind.FORWARD, 0, m, 0, 1) for m in range(40)]
    each = [[message] for message in there]
    none: list[list[Message]] = [[] for _ in there]
    rooms = rooms_of([none, each], [each, none], dict.fromkeys(there, 4))
    assert rooms == {(0, 1): Room(8, 4)}


def test_who_waits_for_each_answer_needs_one_place() -> None:
    there = [Message(Kind.FORWARD, 0, m, 0, 1) for m in range(4)]
    back = [Message(Kind.BACKWARD, 0, m, 1, 0) for m in range(4)]
    needs = [[[], *([each] for each in back)], [[each] for each in there]]
    sends = [[*([each] for each in there), []], [[each] for each in back]]
    rooms = rooms_of(needs, sends, dict.fromkeys([*there, *back], 8))
    assert rooms == {(0, 1): Room(1, 8), (1, 0): Room(1, 8)}
