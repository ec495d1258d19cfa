"""Capturing a mini-batch from the tapes of its passes."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import accumulations_seen
from smdistributed.modelparallel.torch.compat.private.memory import unowned
from smdistributed.modelparallel.torch.compat.private.tensors import users_of_memory
from smdistributed.modelparallel.torch.execute.executor import EnterPass
from smdistributed.modelparallel.torch.execute.graphs import Graphs
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.passes import (
    Computation,
    Inputs,
    Outgoing,
    Passes,
)
from smdistributed.modelparallel.torch.execute.pieces import Foreseen, Piece, Pieces, added_by
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.execute.taping import ComputationOfTapes, Tapes
from smdistributed.modelparallel.torch.tape.confirming import Others
from smdistributed.modelparallel.torch.tape.outside import Outside
from smdistributed.modelparallel.torch.tape.promised import Promised
from smdistributed.modelparallel.torch.tape.running import Keyed


class Draws(Protocol):
    """The random numbers of one action."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """What they are drawn from."""

    @property
    def may_draw(self) -> bool:
        """Whether there are any, as far as is known."""

    def left(self) -> Sequence[torch.Generator]:
        """Returns those that the action in progress, which is captured, has not drawn from."""

    def capturing(self) -> AbstractContextManager[None]:
        """Inside, the action is captured."""

    def seed(self) -> None:
        """Seeds the generators for the step in progress."""


class Exchanges(Others, Protocol):
    """What passes exchange with other ranks than those of their pipeline."""

    def capturing(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Inside, a pass is captured, the first or the last of a mini-batch say."""

    @property
    def memory(self) -> object:
        """What captured exchanges use, as long as they are kept."""


class CapturedAction(NamedTuple):
    """An action that was captured.

    Attributes:
        pieces: what it computes.
        draws: its random numbers.
        outgoing: what leaves after it.
        firsts: the parameters to whose gradients it adds, and no action before it.
        held: what passes of its microbatch have left for later ones when it is over; see
            ``Computation.held``. Others may have the memory later.
    """

    pieces: list[Piece]
    draws: Draws
    outgoing: Outgoing
    firsts: set[torch.Tensor]
    held: list[dict[int, torch.Tensor]]


@dataclass
class Captured:
    """The actions of one kind of mini-batch, as they were captured.

    Attributes:
        passes: what they compute.
        inputs: for each microbatch, copies of its tensor arguments, which are read.
        scales: for each microbatch, by what its losses count; tensors are copies.
        incoming: by message, the buffer that is read.
        reuses_memory: that of messages is used again within the mini-batch; see ``capture``.
        actions: in order.
        results: for each microbatch, the returned values that this rank makes.
        gradients: those that a mini-batch gives to parameters that had none.
        users: of each gradient, how many see it if nobody else holds it.
        exchanged: the memory that exchanges go by.
        promised: the tapes of forward passes, by segment and microbatch.
        outside: what the kernels read that no pass was given.
    """

    passes: Passes
    inputs: Inputs
    scales: Sequence[Scale]
    incoming: dict[Message, torch.Tensor]
    reuses_memory: bool
    actions: list[CapturedAction]
    results: list[dict[int, torch.Tensor]]
    gradients: dict[torch.Tensor, torch.Tensor]
    users: list[int]
    exchanged: object
    promised: dict[tuple[int, int], Promised]
    outside: Outside


def capture(
    graphs: Graphs,
    passes: Passes,
    tapes: Tapes,
    inputs: Inputs,
    scales: Sequence[Scale],
    parameters: Sequence[nn.Parameter],
    draws: Sequence[Draws],
    random: Keyed,
    exchanges: Exchanges,
    enter_pass: EnterPass,
    foreseen: Sequence[Foreseen],
    runs: TapedRuns,
    *,
    reuses_memory: bool,
) -> Captured:
    """Captures the actions of a mini-batch from the tapes of its forward passes.

    No Python of modules runs, and nothing is computed. Where memory of messages is used again, what
    comes must be written when it is needed and not before, and what leaves after an action must be
    gone before the second one after it.

    Args:
        graphs: captures.
        passes: of its kind.
        tapes: of its forward passes.
        inputs: of its microbatches.
        scales: for each microbatch, by what its losses count.
        parameters: of this rank; they have no gradients, and no hooks but such as count.
        draws: of each action.
        random: of the step.
        exchanges: what they exchange within modules.
        enter_pass: called before each action.
        foreseen: know when gradients leave that are reduced.
        runs: compile what lies between products.
        reuses_memory: whether that of messages is.

    Raises:
        Exception: something cannot be captured. Nothing has changed.
    """
    itinerary = passes.itinerary
    own = [[None if each is None else each.detach().clone() for each in one] for one in inputs]
    own_scales = [each.clone() if isinstance(each, torch.Tensor) else each for each in scales]
    outside = Outside(each for tape in tapes.values() for each in tape.outside.values())
    computation = ComputationOfTapes(passes, own, own_scales, tapes, random, runs)
    incoming: dict[Message, torch.Tensor] = {}
    actions: list[CapturedAction] = []
    pieces = Pieces(foreseen)
    seen: set[torch.Tensor] = set()
    try:
        with (
            passes.putting_off(),
            accumulations_seen(parameters, pieces.hook()),
            graphs.session(),
        ):
            for position, (action, drawn) in enumerate(zip(itinerary.actions, draws, strict=True)):
                arrived: Outgoing = []
                if not reuses_memory:
                    arrived = _buffers(computation, itinerary.needs[position])
                enter_pass(action.kind, action.microbatch)
                exchanging = exchanges.capturing(
                    is_first=not position, is_last=position == len(itinerary.actions) - 1
                )
                with (
                    drawn.capturing(),
                    graphs.capturing(drawn.generators) as capturing,
                    exchanging,
                ):
                    pieces.begin(capturing, drawn.left)
                    if reuses_memory:
                        arrived = _buffers(computation, itinerary.needs[position])
                    outgoing = computation.act(position, arrived)
                held = [
                    {index: unowned(each) for index, each in one.items()}
                    for one in computation.held(action.microbatch)
                ]
                captured = pieces.end()
                firsts = set(added_by(captured)) - seen
                seen |= firsts
                actions.append(CapturedAction(captured, drawn, outgoing, firsts, held))
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
    gradients: dict[torch.Tensor, torch.Tensor] = {
        each: gradient for each, gradient in found.items() if gradient is not None
    }
    del computation, found
    if outside.has_changed():
        raise UnsupportedError("the memory or a hook of a tensor has changed since")
    return Captured(
        passes,
        own,
        own_scales,
        incoming,
        reuses_memory,
        actions,
        results,
        gradients,
        users_of(gradients),
        exchanges.memory,
        promised_of(tapes),
        outside,
    )


def promised_of(tapes: Tapes) -> dict[tuple[int, int], Promised]:
    """Returns tapes with promises in them."""
    by_tape: collections.defaultdict[int, dict[int, Promised]] = collections.defaultdict(dict)
    found = {}
    for (segment, microbatch), tape in tapes.items():
        earlier = by_tape[microbatch]
        found[segment, microbatch] = earlier[id(tape)] = Promised(tape, earlier)
    return found


def counting(added: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Returns a hook of parameters that notes to which gradients something was added."""

    def note(parameter: torch.Tensor) -> None:
        added.append(parameter)

    note.only_counts = True  # type: ignore[attr-defined] # see weight_gradients.py
    return note


def _buffers(computation: Computation, messages: Sequence[Message]) -> Outgoing:
    return [(message, computation.buffer(message)) for message in messages]


def _without_memory(messages: Outgoing) -> Outgoing:
    return [(message, unowned(tensor)) for message, tensor in messages]


def users_of(gradients: Mapping[torch.Tensor, torch.Tensor]) -> list[int]:
    """Returns how many tensors see the memory of each, and variables it."""
    return [
        users_of_memory(gradient) + sys.getrefcount(gradient) for gradient in gradients.values()
    ]
