"""Running a scheduled plan: one loop for every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction
from smdistributed.modelparallel.torch.execute.clock import clock_of
from smdistributed.modelparallel.torch.execute.itinerary import Itinerary
from smdistributed.modelparallel.torch.execute.links import Links, Transfer
from smdistributed.modelparallel.torch.execute.mailboxes import Laying, Taking
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.passes import Outgoing

#: Called before each action with its direction and microbatch.
EnterPass = Callable[[Kind, int], None]
#: What is being sent, in order, with the position of the action after which it leaves.
_Outgoing = dict[Message, tuple[int, Transfer | Laying]]


class Acting(Protocol):
    """Does the actions of one mini-batch, in order.

    Attributes:
        is_started: the first of them was done ahead; see ``Executor.start``.
        reuses_memory: what leaves after an action may be written over by the second one after it.
    """

    is_started: bool
    reuses_memory: bool

    def buffer(self, message: Message) -> torch.Tensor:
        """Returns a buffer for a message that comes."""

    def act(self, position: int, arrived: Outgoing) -> Outgoing:
        """Does an action with what has arrived for it; returns what leaves after it."""


class Executor:
    """Has the actions of this rank done, in their order, and moves what goes between ranks.

    Args:
        itinerary: what this rank does.
        links: the way to the other ranks.
        device: where it computes.
    """

    def __init__(self, itinerary: Itinerary, links: Links, device: torch.device) -> None:
        self._itinerary = itinerary
        self._links = links
        self._device = device
        self._clock = clock_of(device)
        self._started: tuple[Any, Any] | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """What this rank does, in order."""
        return self._itinerary.actions

    def start(self, first: Callable[[], None]) -> None:
        """Has the first action of a mini-batch done ahead of ``run``, which may not come.

        Args:
            first: does it.
        """
        self._clock.begin()
        began = self._clock.mark()
        first()
        self._started = began, self._clock.mark()

    def run(self, acting: Acting, enter_pass: EnterPass) -> list[Any]:
        """Runs one mini-batch.

        Args:
            acting: does its actions.
            enter_pass: called before each of them.

        Returns:
            What ``timed`` makes times of.

        Raises:
            CommError: a peer died or did not take part in time.
        """
        marks = []
        incoming: dict[Message, Transfer | Taking] = {}
        outgoing: _Outgoing = {}
        started, self._started = self._started if acting.is_started else None, None
        if started is None:
            self._clock.begin()
        mark = self._clock.mark
        links, needs = self._links, self._itinerary.needs

        def post(receives: Sequence[Message]) -> None:
            for message in receives:
                incoming[message] = links.receive_message(acting.buffer(message), message.source)

        # Posted one action ahead, a transfer overlaps with an action. On a GPU a waiting receive
        # would hold multiprocessors, so it is posted at the point of need.
        ahead = 1 if self._device.type == "cpu" else 0
        posts = iter(self._itinerary.posts)
        for receives in itertools.islice(posts, ahead):
            post(receives)
        for position, action in enumerate(self._itinerary.actions):
            links.begin(action)
            if acting.reuses_memory:
                _settle(outgoing, position - 1)
            post(next(posts, ()))
            arrived = [(message, incoming.pop(message).wait()) for message in needs[position]]
            _end(outgoing, self._itinerary.answered[position])
            enter_pass(action.kind, action.microbatch)
            start = mark()
            leaving = acting.act(position, arrived)
            marks.append((start, mark()) if position or started is None else started)
            self._send(outgoing, position, leaving)
            del arrived, leaving  # their memory may be free now
        _settle(outgoing, len(self._itinerary.actions))
        links.begin(None)
        return marks

    def _send(self, outgoing: _Outgoing, position: int, leaving: Outgoing) -> None:
        # They end about in the order in which they began: asking the first ones is enough.
        while outgoing and (first := next(iter(outgoing.items())))[1][1].is_done:
            del outgoing[first[0]]
        for message, tensor in leaving:
            transfer = self._links.send_message(tensor, message.target)
            outgoing[message] = position, transfer

    def sent(self) -> list[tuple[Message, Action, int]]:
        """Returns what this rank sends, after which action, and its size in bytes."""
        itinerary = self._itinerary
        return [
            (message, action, itinerary.num_bytes[message])
            for action, messages in zip(itinerary.actions, itinerary.sends, strict=True)
            for message in messages
        ]

    def needed(self) -> list[tuple[Message, Action]]:
        """Returns what others send to this rank, and which action reads it first."""
        return [
            (message, action)
            for action, messages in zip(self.actions, self._itinerary.needs, strict=True)
            for message in messages
        ]

    def timed(self, marks: Sequence[Any]) -> list[TimedAction]:
        """Returns the actions with the times of a run, in seconds since the epoch."""
        times = iter(self._clock.seconds([mark for pair in marks for mark in pair]))
        return [TimedAction(action, next(times), next(times)) for action in self._itinerary.actions]


def _settle(outgoing: _Outgoing, position: int) -> None:
    """Has what comes next find that all has left that was sent before an action."""
    while outgoing and (first := next(iter(outgoing.items())))[1][0] < position:
        first[1][1].wait()
        del outgoing[first[0]]


def _end(outgoing: _Outgoing, answered: Sequence[Message]) -> None:
    """Lets go of what has been used by those that it was sent to.

    Of a message of gloo nobody knows that it has left, until that is waited for.
    """
    for message in answered:
        if (found := outgoing.pop(message, None)) is not None:
            found[1].wait()
