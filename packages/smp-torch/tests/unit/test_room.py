"""Room for messages is enough in whatever order ranks get on, and there is none too much."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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

    def run(self, choose: Choose) -> Iterator[tuple[tuple[int, int], int]]:
        """Has the ranks get on; gives, at each send, the pair, and how far back the oldest is."""
        done = [0] * len(self.needs)
        sent: dict[tuple[int, int], list[Message]] = {}
        laid: set[Message] = set()
        used: set[Message] = set()
        while ready := [
            rank
            for rank, actions in enumerate(self.needs)
            if done[rank] < len(actions) and laid.issuperset(actions[done[rank]])
        ]:
            rank = choose(ready)
            used.update(self.needs[rank][done[rank]])
            for message in self.sends[rank][done[rank]]:
                way = message.source, message.target
                former = sent.setdefault(way, [])
                former.append(message)
                laid.add(message)
                oldest = next(i for i, each in enumerate(former) if each not in used)
                yield way, len(former) - oldest
            done[rank] += 1
        assert done == [len(actions) for actions in self.needs]


def last_of_all(late: int) -> Choose:
    """Has a rank get on when nobody else can."""
    return lambda ready: next((rank for rank in ready if rank != late), late)


@pytest.mark.parametrize("seed", range(60))
def test_room_is_what_may_be_needed(seed: int) -> None:
    dice = random.Random(seed)
    job = Job.drawn(dice)
    rooms = rooms_of(job.needs, job.sends, job.num_bytes)
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


def test_who_waits_for_each_answer_needs_one_place() -> None:
    there = [Message(Kind.FORWARD, 0, m, 0, 1) for m in range(4)]
    back = [Message(Kind.BACKWARD, 0, m, 1, 0) for m in range(4)]
    needs = [[[], *([each] for each in back)], [[each] for each in there]]
    sends = [[*([each] for each in there), []], [[each] for each in back]]
    rooms = rooms_of(needs, sends, dict.fromkeys([*there, *back], 8))
    assert rooms == {(0, 1): Room(1, 8), (1, 0): Room(1, 8)}
