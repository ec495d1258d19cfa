"""How many messages from one rank to another may wait to be used: the room that they need.

A rank runs ahead of another one as far as nothing that it does depends on that one. With room for
all that it can send meanwhile, no message ever waits for room that only a later one would make,
whatever the order in which devices do what they are told.
"""

from __future__ import annotations

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


#: By (source, target).
Rooms = Mapping[tuple[int, int], Room]


def rooms_of(
    needs: Sequence[Sequence[Sequence[Message]]],
    sends: Sequence[Sequence[Sequence[Message]]],
    num_bytes: Mapping[Message, int],
) -> Rooms:
    """Returns the room that the messages of a mini-batch need.

    Args:
        needs: for each rank and each of its actions, what it needs that no earlier one needed.
        sends: likewise, what leaves after it.
        num_bytes: of each message.
    """
    used_at = {
        message: position
        for actions in needs
        for position, messages in enumerate(actions)
        for message in messages
    }
    #: By (source, target): what was sent, in order, and how many of these are surely used.
    sent: dict[tuple[int, int], list[Message]] = {}
    used: dict[tuple[int, int], int] = {}
    rooms: dict[tuple[int, int], Room] = {}
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
                    former = rooms.get(way, Room(0, 0))
                    rooms[way] = Room(
                        max(former.places, len(sent[way]) - oldest),
                        max(former.num_bytes, num_bytes[message]),
                    )
        assert sum(done) > before, "actions wait for each other"
    return rooms
