"""What one rank of a pipeline does around each of its actions, derived once from the schedule.

Which values it must have received before, and which it sends after. Receives are posted in the
sender's order, which the schedule fixes, so no message carries a tag or header.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smdistributed.modelparallel.common.planning.schedule import Action, Kind, Schedule
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.room import Rooms, rooms_of
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.ir import Value


@dataclass
class Itinerary:
    """What one rank does, in order.

    Attributes:
        actions: its actions.
        posts: for each action, the messages whose receives must be posted before it, and were not
            before an earlier one: those that it needs, and what their senders send before those.
        needs: for each action, the messages that must have arrived, and were not needed before.
        sends: for each action, the messages that leave after it.
        answered: for each action, the messages of this rank that others have surely used when all
            has arrived that it needs, and of which an earlier action could not tell.
        releases: for each action, the (value, microbatch) that this rank needs no longer.
        last_forwards: for each action, the microbatches that have no forward pass here after it.
        num_bytes: the sizes of the messages that this rank sends.
        rooms: of every (source, target) pair of ranks that exchanges messages, what has to fit.
    """

    actions: tuple[Action, ...]
    posts: list[list[Message]]
    needs: list[list[Message]]
    sends: list[list[Message]]
    answered: list[list[Message]]
    releases: list[list[tuple[int, int]]]
    last_forwards: list[list[int]]
    num_bytes: Mapping[Message, int]
    rooms: Rooms


def prepare(plans: Sequence[Plan], schedule: Schedule, rank: int) -> Itinerary:
    """Derives a rank's itinerary.

    Args:
        plans: the plan of each microbatch.
        schedule: the order of actions on every rank.
        rank: the pp_rank.
    """
    sends = [_all_sends(plans, actions, source) for source, actions in enumerate(schedule.ranks)]
    needs = [_all_needs(plans, actions, target) for target, actions in enumerate(schedule.ranks)]
    sizes = {
        plan: {value.index: value.num_bytes for each in plan.segments for value in each.outputs}
        for plan in set(plans)
    }
    num_bytes: dict[Message, int] = {}
    arrivals: dict[int, list[Message]] = {}
    for message in itertools.chain(*itertools.chain(*sends)):
        num_bytes[message] = sizes[plans[message.microbatch]][message.value]
        if message.target == rank:
            arrivals.setdefault(message.source, []).append(message)
    actions = schedule.ranks[rank]
    return Itinerary(
        actions,
        _posts(needs[rank], arrivals),
        needs[rank],
        sends[rank],
        _answered(needs, sends, rank),
        _releases(plans, actions),
        _last_forwards(actions),
        {message: size for message, size in num_bytes.items() if message.source == rank},
        rooms_of(needs, sends, num_bytes),
    )


def _all_sends(
    plans: Sequence[Plan], actions: Sequence[Action], source: int
) -> list[list[Message]]:
    """Returns, for each action of a rank, what leaves after it."""
    ready: collections.Counter[tuple[Value, int]] = collections.Counter()
    return [_sends(plans[action.microbatch], action, source, ready) for action in actions]


def _all_needs(
    plans: Sequence[Plan], actions: Sequence[Action], target: int
) -> list[list[Message]]:
    """Returns, for each action of a rank, what it needs that no earlier one needed."""
    # Several segments of a rank may read a value: the first of them takes it.
    taken: set[Message] = set()
    needs = []
    for action in actions:
        coming = _needs(plans[action.microbatch], action, target)
        needs.append([message for message in coming if message not in taken])
        taken.update(coming)
    return needs


def _posts(
    needs: Sequence[Sequence[Message]], arrivals: Mapping[int, Sequence[Message]]
) -> list[list[Message]]:
    """Returns the receives to post before each action: in the order in which senders send."""
    coming = {source: iter(messages) for source, messages in arrivals.items()}
    posted: set[Message] = set()
    posts: list[list[Message]] = []
    for each in needs:
        posts.append([])
        for message in each:
            while message not in posted:
                following = next(coming[message.source])
                posted.add(following)
                posts[-1].append(following)
    return posts


def _answered(
    needs: Sequence[Sequence[Sequence[Message]]],
    sends: Sequence[Sequence[Sequence[Message]]],
    rank: int,
) -> list[list[Message]]:
    """Returns, for each action of a rank, which of its messages are used when it can begin.

    Who sends a message has begun all its actions up to that one, with what they needed.
    """
    sent_at = {
        message: position
        for actions in sends
        for position, messages in enumerate(actions)
        for message in messages
    }
    answered: list[list[Message]] = []
    told = [0] * len(needs)
    for needed in needs[rank]:
        answered.append([])
        for message in needed:
            begun = sent_at[message] + 1
            source = message.source
            for used in itertools.chain(*needs[source][told[source] : begun]):
                if used.source == rank:
                    answered[-1].append(used)
            told[source] = max(told[source], begun)
    return answered


def _last_forwards(actions: Sequence[Action]) -> list[list[int]]:
    last = {
        action.microbatch: position
        for position, action in enumerate(actions)
        if action.kind is Kind.FORWARD
    }
    return [
        [m for m, where in last.items() if where == position] for position in range(len(actions))
    ]


def _releases(plans: Sequence[Plan], actions: Sequence[Action]) -> list[list[tuple[int, int]]]:
    last_use: dict[tuple[int, int], int] = {}
    for position, action in enumerate(actions):
        if action.kind is Kind.FORWARD:
            segment = plans[action.microbatch].segments[action.segment]
            for value in (*segment.inputs, *segment.outputs):
                last_use[value.index, action.microbatch] = position
    releases: list[list[tuple[int, int]]] = [[] for _ in actions]
    for key, position in last_use.items():
        releases[position].append(key)
    return releases


def _sends(
    plan: Plan, action: Action, rank: int, ready: collections.Counter[tuple[Value, int]]
) -> list[Message]:
    """Returns what leaves after an action; ``ready`` counts finished gradients of a value."""
    segment = plan.segments[action.segment]
    m = action.microbatch
    if action.kind is Kind.FORWARD:
        return [
            Message(Kind.FORWARD, value.index, m, rank, target)
            for value in segment.outputs
            for target in plan.ranks_reading(value)
        ]
    if action.kind is Kind.WEIGHT_GRADIENTS:
        return []
    sends = []
    for value in segment.inputs:
        owner = plan.segments[value.node.segment].rank
        if value not in plan.with_gradient or owner == rank:
            continue
        ready[value, m] += 1
        # The rank's readers add up their gradients; the last one sends the sum.
        if ready[value, m] == len(_backward_readers(plan, value, rank)):
            sends.append(Message(Kind.BACKWARD, value.index, m, rank, owner))
    return sends


def _needs(plan: Plan, action: Action, rank: int) -> list[Message]:
    segment = plan.segments[action.segment]
    m = action.microbatch
    if action.kind is Kind.FORWARD:
        return [
            Message(Kind.FORWARD, value.index, m, plan.segments[value.node.segment].rank, rank)
            for value in segment.inputs
            if plan.segments[value.node.segment].rank != rank
        ]
    if action.kind is Kind.WEIGHT_GRADIENTS:
        return []
    return [
        Message(Kind.BACKWARD, value.index, m, reader, rank)
        for value in segment.outputs
        if value in plan.with_gradient
        for reader in plan.ranks_reading(value)
        if _backward_readers(plan, value, reader)
    ]


def _backward_readers(plan: Plan, value: Value, rank: int) -> list[int]:
    return [
        index
        for index in plan.readers.get(value, ())
        if plan.segments[index].rank == rank and index in plan.backward
    ]
