"""A mini-batch whose actions were captured: it runs without the Python in its modules.

What comes in is copied to where the captured kernels read it; what goes out, and the gradients of
the parameters, lie where they write it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import accumulations_seen
from smdistributed.modelparallel.torch.compat.private.memory import unowned
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all, users_of_memory
from smdistributed.modelparallel.torch.execute.executor import EnterPass
from smdistributed.modelparallel.torch.execute.graphs import Graph, Graphs
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.passes import (
    Computation,
    Inputs,
    Outgoing,
    Passes,
)
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.weight_gradients import note_added


class Draws(Protocol):
    """The random numbers of one action."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """What they are drawn from."""

    @property
    def may_draw(self) -> bool:
        """Whether there are any, as far as is known."""

    def capturing(self) -> AbstractContextManager[None]:
        """Inside, the action is captured."""

    def seed(self) -> None:
        """Seeds the generators for the step in progress."""


class Exchanges(Protocol):
    """What passes exchange with other ranks than those of their pipeline."""

    def capturing(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Inside, a pass is captured, the first or the last of a mini-batch say."""

    @property
    def memory(self) -> object:
        """What captured exchanges use, as long as they are kept."""


class CapturedAction(NamedTuple):
    """An action that was captured.

    Attributes:
        graph: what it computes.
        draws: its random numbers.
        outgoing: what leaves after it.
        added: the parameters to whose gradients it adds, in order.
    """

    graph: Graph
    draws: Draws
    outgoing: Outgoing
    added: list[torch.Tensor]


@dataclass
class Replay:
    """The actions of one kind of mini-batch, as they were captured; see ``executor.Acting``.

    Attributes:
        inputs: for each microbatch, copies of its tensor arguments, which are read.
        scales: for each microbatch, by what its losses count; tensors are copies.
        incoming: by message, the buffer that is read.
        reuses_memory: that of messages is used again within the mini-batch; see ``capture``.
        actions: in order.
        results: for each microbatch, the returned values that this rank makes.
        gradients: those that a mini-batch gives to parameters that had none.
        users: of each gradient, how many see it if nobody else holds it.
        exchanged: the memory that exchanges go by.
        is_started: the first action of the mini-batch in progress has been done.
    """

    inputs: Inputs
    scales: Sequence[Scale]
    incoming: dict[Message, torch.Tensor]
    reuses_memory: bool
    actions: list[CapturedAction]
    results: list[dict[int, torch.Tensor]]
    gradients: dict[nn.Parameter, torch.Tensor]
    users: list[int]
    exchanged: object
    is_started: bool = False

    @property
    def draws_first(self) -> bool:
        """Whether the first action draws random numbers, as far as is known."""
        return self.actions[0].draws.may_draw

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Does the first action, which needs no message and no random numbers.

        Args:
            tensors: the tensor arguments of its microbatch, of which no type has changed.
        """
        first = [pair for pair in zip(self.inputs[0], tensors, strict=False) if pair[0] is not None]
        if first:
            own, given = zip(*first, strict=True)
            with torch.no_grad():
                copy_all(own, given)
        self.actions[0].graph.replay()

    def fits(self, inputs: Inputs, scales: Sequence[Scale]) -> bool:
        """Whether a mini-batch differs from the captured one by the numbers in tensors alone."""
        return _looks(self.inputs, self.scales) == _looks(inputs, scales)

    @property
    def is_held(self) -> bool:
        """Whether somebody still has a gradient of the last mini-batch, or a view of it."""
        now = _users(self.gradients)
        return any(map(operator.gt, now, self.users))

    def begin(self, inputs: Inputs, scales: Sequence[Scale], *, is_started: bool) -> None:
        """Takes the tensors of a mini-batch, which ``fits``; parameters have their gradients."""
        self.is_started = is_started
        own, given = _tensors(self.inputs, self.scales), _tensors(inputs, scales)
        if own:
            with torch.no_grad():
                copy_all(own, given)
        for parameter, gradient in self.gradients.items():
            # Another object each time: a script may give it other memory, or attributes.
            parameter.grad = gradient.detach()

    def buffer(self, message: Message) -> torch.Tensor:
        """See ``Acting``."""
        return self.incoming[message]

    def act(self, position: int, arrived: Outgoing) -> Outgoing:
        """See ``Acting``."""
        action = self.actions[position]
        if position or not self.is_started:
            action.draws.seed()
            action.graph.replay()
        # A reduction begins before the stream waits for what the next action needs.
        for parameter in action.added:
            note_added(parameter)
        return action.outgoing


def capture(
    graphs: Graphs,
    passes: Passes,
    inputs: Inputs,
    scales: Sequence[Scale],
    parameters: Sequence[nn.Parameter],
    draws: Sequence[Draws],
    exchanges: Exchanges,
    enter_pass: EnterPass,
    *,
    reuses_memory: bool,
) -> Replay:
    """Captures the actions of a mini-batch; computes nothing.

    Where memory of messages is used again, what comes must be written when it is needed and not
    before, and what leaves after an action must be gone before the second one after it.

    Args:
        graphs: captures.
        passes: of its kind.
        inputs: of its microbatches.
        scales: for each microbatch, by what its losses count.
        parameters: of this rank; they have no gradients, and no hooks but such as count.
        draws: of each action.
        exchanges: what they exchange within modules.
        enter_pass: called before each action.
        reuses_memory: whether that of messages is.

    Raises:
        Exception: something cannot be captured. Nothing has changed but what the Python of modules
            changes.
    """
    itinerary = passes.itinerary
    own = [[None if each is None else each.detach().clone() for each in one] for one in inputs]
    own_scales = [each.clone() if isinstance(each, torch.Tensor) else each for each in scales]
    computation = Computation(passes, own, own_scales)
    incoming: dict[Message, torch.Tensor] = {}
    actions: list[CapturedAction] = []
    added: list[torch.Tensor] = []

    def note(parameter: torch.Tensor) -> None:
        added.append(parameter)

    note.only_counts = True  # type: ignore[attr-defined] # see weight_gradients.py
    try:
        with passes.putting_off(), accumulations_seen(parameters, note), graphs.session():
            for position, (action, drawn) in enumerate(zip(itinerary.actions, draws, strict=True)):
                arrived: Outgoing = []
                if not reuses_memory:
                    arrived = _buffers(computation, itinerary.needs[position])
                enter_pass(action.kind, action.microbatch)
                exchanging = exchanges.capturing(
                    is_first=not position, is_last=position == len(itinerary.actions) - 1
                )
                with drawn.capturing(), graphs.capturing(drawn.generators) as graph, exchanging:
                    if reuses_memory:
                        arrived = _buffers(computation, itinerary.needs[position])
                    outgoing = computation.act(position, arrived)
                actions.append(CapturedAction(graph, drawn, outgoing, added.copy()))
                added.clear()
                if reuses_memory:
                    arrived = _without_memory(arrived)
                    if position:
                        former = actions[position - 1]
                        actions[position - 1] = former._replace(
                            outgoing=_without_memory(former.outgoing)
                        )
                incoming |= arrived
        found = {each: each.grad for each in parameters}
    finally:
        for parameter in parameters:
            parameter.grad = None
    results = computation.results
    gradients = {each: gradient for each, gradient in found.items() if gradient is not None}
    del computation, found
    users = _users(gradients)
    return Replay(
        own,
        own_scales,
        incoming,
        reuses_memory,
        actions,
        results,
        gradients,
        users,
        exchanges.memory,
    )


def _buffers(computation: Computation, messages: Sequence[Message]) -> Outgoing:
    return [(message, computation.buffer(message)) for message in messages]


def _without_memory(messages: Outgoing) -> Outgoing:
    return [(message, unowned(tensor)) for message, tensor in messages]


def _tensors(inputs: Inputs, scales: Sequence[Scale]) -> list[torch.Tensor]:
    every = (each for one in (*inputs, scales) for each in one)
    return [each for each in every if isinstance(each, torch.Tensor)]


def _looks(inputs: Inputs, scales: Sequence[Scale]) -> list[list[object]]:
    """Returns what is burnt into captured kernels of what they are given."""
    return [
        [
            (each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else each
            for each in one
        ]
        for one in (*inputs, scales)
    ]


def _users(gradients: Mapping[nn.Parameter, torch.Tensor]) -> list[int]:
    """Returns how many tensors see the memory of each, and variables it."""
    return [
        users_of_memory(gradient) + sys.getrefcount(gradient) for gradient in gradients.values()
    ]
