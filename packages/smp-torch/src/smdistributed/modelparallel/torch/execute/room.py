"""How many messages from one rank to another may wait to be used: the room that they need.

A rank runs ahead of another one as far as nothing that it does depends on that one. With room for
all that it can send meanwhile, no message waits for room. Where that is much, as in steps without
backward passes, there is less: so much that all get on, even if a rank does nothing while a message
waits. (Whether they do then depends on nobody's pace.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from smdistributed.modelparallel.torch.execute.message import Message


class Room(NamedTuple):
    """Of the messages from one rank to another.

    Attributes:
        places: how many have to fit; the next one takes the place of the oldest.
        num_bytes: of the largest.
    """

    places: int
    num_bytes: int


#: (source, target).
_Way = tuple[int, int]
Rooms = Mapping[_Way, Room]
#: Of each rank and each of its actions.
_Messages = Sequence[Sequence[Sequence[Message]]]
#: As many places are enough for two ranks that work side by side.
_FEW = 8


def rooms_of(
    needs: _Messages, sends: _Messages, num_bytes: Mapping[Message, int], few: int = _FEW
) -> Rooms:
    """Returns the room that the messages of a mini-batch need.

    Args:
        needs: what an action needs that no earlier one of the rank needed.
        sends: what leaves after it.
        num_bytes: of each message.
        few: if there are more places for messages of a pair of ranks, they have to be needed.
    """
    most = _most_waiting(needs, sends)
    largest: dict[_Way, int] = {}
    for message, size in num_bytes.items():
        way = message.source, message.target
        largest[way] = max(largest.get(way, 0), size)
    places = {way: min(count, few) for way, count in most.items()}
    while not _get_on(needs, sends, places):
        few *= 2
        places = {way: min(count, few) for way, count in most.items()}
    return {way: Room(places[way], largest[way]) for way in places}


def _get_on(needs: _Messages, sends: _Messages, places: Mapping[_Way, int]) -> bool:
    """Whether all ranks come to their ends, if each stops as long as a message finds no place."""
    programs: list[list[Message | Sequence[Message]]] = [[] for _ in needs]
    for program, *actions in zip(programs, needs, sends, strict=True):
        for need, leaving in zip(*actions, strict=True):
            program += [need, *leaving]
    at = [0] * len(programs)
    lying: dict[_Way, deque[Message]] = {way: deque() for way in places}
    sent: set[Message] = set()
    used: set[Message] = set()

    def is_possible(step: Message | Sequence[Message]) -> bool:
        if not isinstance(step, Message):
            return sent.issuperset(step)
        box = lying[step.source, step.target]
        while box and box[0] in used:
            box.popleft()
        return len(box) < places[step.source, step.target]

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and is_possible(step := program[at[rank]]):
                if isinstance(step, Message):
                    lying[step.source, step.target].append(step)
                    sent.add(step)
                else:
                    used.update(step)
                at[rank] += 1
                moved = True
    return at == [len(program) for program in programs]


def _most_waiting(needs: _Messages, sends: _Messages) -> dict[_Way, int]:
    """Returns how far back the oldest message may be that waits, at most, where one is sent."""
    used_at = {
        message: position
        for actions in needs
        for position, messages in enumerate(actions)
        for message in messages
    }
    #: By (source, target): what was sent, in order, and how many of these are surely used.
    sent: dict[_Way, list[Message]] = {}
    used: dict[_Way, int] = {}
    most: dict[_Way, int] = {}
    #: How many actions of each rank have surely begun when a message leaves.
    begun: dict[Message, list[int]] = {}
    clocks = [[0] * len(needs) for _ in needs]
    done = [0] * len(needs)
    while any(each < len(actions) for each, actions in zip(done, needs, strict=True)):
        before = sum(done)
        for rank, clock in enumerate(clocks):
            for position in range(done[rank], len(needs[rank])):
                if not all(message in begun for message in needs[rank][position]):
                    break
                for message in needs[rank][position]:
                    clock[:] = map(max, clock, begun[message])
                done[rank] = clock[rank] = position + 1
                for message in sends[rank][position]:
                    begun[message] = clock.copy()
                    way = message.source, message.target
                    sent.setdefault(way, []).append(message)
                    oldest = used.get(way, 0)
                    while used_at[sent[way][oldest]] < clock[message.target]:
                        oldest += 1
                    used[way] = oldest
                    most[way] = max(most.get(way, 0), len(sent[way]) - oldest)
        assert sum(done) > before, "actions wait for each other"
    return most
