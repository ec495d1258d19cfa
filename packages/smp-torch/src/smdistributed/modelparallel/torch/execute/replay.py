"""A mini-batch whose actions were captured: kernels are launched where Python confirms them.

The Python of each forward pass runs, answered from its tape. Where it does what the tape has, the
graph of the pass is launched, and later that of its backward pass. Where it does not, both are
computed as they are, between the captured ones: what these left is copied from where it lies, and
what they read to where they do.

What comes in is copied to where the captured kernels read it; what goes out, and the gradients of
the parameters, lie where they write it.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.planning.schedule import Action, Kind
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
from smdistributed.modelparallel.torch.execute.taping import ComputationOfTapes, Tapes
from smdistributed.modelparallel.torch.execute.taping import Draws as StepDraws
from smdistributed.modelparallel.torch.execute.weight_gradients import note_added
from smdistributed.modelparallel.torch.tape.confirming import Confirming, Others, Promised
from smdistributed.modelparallel.torch.tape.outside import Outside


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
        graph: what it computes.
        draws: its random numbers.
        outgoing: what leaves after it.
        added: the parameters to whose gradients it adds, in order.
        firsts: those of them that no action before it adds to.
        held: what passes of its microbatch have left for later ones when it is over; see
            ``Computation.held``. Others may have the memory later.
    """

    graph: Graph
    draws: Draws
    outgoing: Outgoing
    added: list[torch.Tensor]
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


class Replay:
    """Mini-batches of one kind, run as captured where Python confirms it; see ``Acting``.

    Args:
        captured: their actions.
        parameters: of this rank.
        random: of the step.
        others: the ranks that compute the passes with this one.

    Attributes:
        results: for each microbatch, the returned values that this rank makes.
        is_started: the first action of the mini-batch in progress has been done.
        num_off: how many passes of the last mini-batch went another way.
    """

    def __init__(
        self,
        captured: Captured,
        parameters: Sequence[nn.Parameter],
        random: StepDraws,
        others: Others,
    ) -> None:
        self._captured = captured
        self._parameters = parameters
        self._random = random
        self._others = others
        self._actions = captured.passes.itinerary.actions
        #: By position, that of the action before of the same microbatch.
        self._before = _positions_before(self._actions)
        self.reuses_memory = captured.reuses_memory
        self.is_started = False
        self.results: list[dict[int, torch.Tensor]] = []
        self.num_off = 0
        self._off: set[tuple[int, int]] = set()
        #: To whose gradients passes of the mini-batch have added.
        self._added: set[torch.Tensor] = set()
        self._given: Inputs = []
        self._computation: Computation | None = None

    @property
    def draws_first(self) -> bool:
        """Whether the first action draws random numbers, as far as is known."""
        return self._captured.actions[0].draws.may_draw

    @property
    def has_moved(self) -> bool:
        """Whether something is elsewhere that the kernels read."""
        return self._captured.outside.has_changed()

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Does the first action, which needs no message and no random numbers.

        Args:
            tensors: the tensor arguments of its microbatch, of which no type has changed.
        """
        captured = self._captured
        pairs = zip(captured.inputs[0], tensors, strict=False)
        first = [pair for pair in pairs if pair[0] is not None]
        if first:
            own, given = zip(*first, strict=True)
            with torch.no_grad():
                copy_all(own, given)
        captured.actions[0].graph.replay()

    def fits(self, inputs: Inputs, scales: Sequence[Scale]) -> bool:
        """Whether a mini-batch differs from the captured one by the numbers in tensors alone."""
        return _looks(self._captured.inputs, self._captured.scales) == _looks(inputs, scales)

    @property
    def is_held(self) -> bool:
        """Whether somebody still has a gradient of the last mini-batch, or a view of it."""
        now = _users(self._captured.gradients)
        return any(map(operator.gt, now, self._captured.users))

    def begin(self, inputs: Inputs, scales: Sequence[Scale], *, is_started: bool) -> None:
        """Takes the tensors of a mini-batch, which ``fits``; parameters have their gradients."""
        captured = self._captured
        self.is_started = is_started
        self._given = inputs
        self._computation = Computation(captured.passes, inputs, scales)
        self._off, self._added, self.num_off = set(), set(), 0
        self.results = list(map(dict, captured.results))
        own, given = _tensors(captured.inputs, captured.scales), _tensors(inputs, scales)
        if own:
            with torch.no_grad():
                copy_all(own, given)
        for parameter, gradient in captured.gradients.items():
            # Another object each time: a script may give it other memory, or attributes.
            parameter.grad = gradient.detach()

    def buffer(self, message: Message) -> torch.Tensor:
        """See ``Acting``."""
        return self._captured.incoming[message]

    def act(self, position: int, arrived: Outgoing) -> Outgoing:
        """See ``Acting``."""
        action = self._actions[position]
        is_off = (action.segment, action.microbatch) in self._off
        if action.kind is Kind.FORWARD:
            confirmed = self._forward(position, arrived)
            if confirmed is not None:
                return confirmed
        elif is_off:
            return self._backward(position, arrived)
        captured = self._captured.actions[position]
        if position or not self.is_started:
            captured.draws.seed()
            captured.graph.replay()
        # A reduction begins before the stream waits for what the next action needs.
        for parameter in captured.added:
            note_added(parameter)
        self._added.update(captured.added)
        self._end_if_last(position)
        return captured.outgoing

    # ------------------------------------------------------------------ Python

    def _forward(self, position: int, arrived: Outgoing) -> Outgoing | None:
        """Runs the Python of a forward pass; returns what leaves, if that went another way."""
        action, computation = self._actions[position], self._computation
        assert computation is not None
        m = action.microbatch
        promised = self._captured.promised[action.segment, m]
        passes, carried = self._captured.passes, computation.carried[m]
        stack = contextlib.ExitStack()
        entrances: list[Any] = []
        exchanged: list[Any] = []

        def give() -> list[torch.Tensor | None]:
            self._take(position, arrived)
            arguments, entered = computation.enter(action)
            # Promises become what they are given, and that becomes a promise, wherever it is held.
            later = promised.given(num_inputs, len(arguments))
            becoming = {id(each): promise for each, promise in zip(arguments, later, strict=True)}
            entrances.extend((index, becoming.get(id(each), each)) for index, each in entered)
            exchanged.append(stack.enter_context(computation.computing(action)))
            inputs = [None if each is None else each.detach() for each in self._given[m]]
            return [*inputs, *(each if each.requires_grad else each.detach() for each in arguments)]

        confirming = Confirming(
            promised, passes.device, passes.devices, self._random, give, self._others
        )
        has_backward = action.segment in passes.plans[m].backward
        num_inputs = len(self._given[m])
        inputs = promised.given(0, num_inputs)
        arguments = promised.given(num_inputs, promised.tape.num_given - num_inputs)
        with (
            stack,
            self._renewed_after_errors(action),
            torch.set_grad_enabled(has_backward),
            self._random.seen_by(confirming),
            confirming.confirming(),
        ):
            program = passes.programs[m][action.segment]
            results = program.run(inputs, carried, *arguments)
            confirming.end(results)
            del inputs, arguments
            if not confirming.is_off:
                del results
                computation.end_forwards(position)
                if _is_confirmed(confirming, promised, list(carried.tensors())):
                    return None
                results = promised.results
        computation.leave(action, entrances, exchanged[0], results)
        self._renew(action)
        self._off.add((action.segment, m))
        self.num_off += 1
        self._leave_behind(position)
        for index, tensor in computation.results[m].items():
            self.results[m][index] = tensor
        return computation.outgoing(position)

    @contextlib.contextmanager
    def _renewed_after_errors(self, action: Action) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._renew(action)
            raise

    def _renew(self, action: Action) -> None:
        """Makes new promises for a pass that has kept its own, and for those that use its tensors.

        What it has left is another tensor now, so passes that get it go another way, too.
        """
        is_later = False
        for (segment, m), each in self._captured.promised.items():
            is_later |= (segment, m) == (action.segment, action.microbatch)
            if is_later and m == action.microbatch:
                each.renew()

    # ------------------------------------------------------------------ passes that are off

    def _take(self, position: int, arrived: Outgoing) -> None:
        """Gives a pass that is computed as it is what captured passes have left for it."""
        computation = self._computation
        assert computation is not None
        before = self._before[position]
        held = computation.held(self._actions[position].microbatch)
        if before is not None:
            for own, theirs in zip(held, self._captured.actions[before].held, strict=True):
                own.clear()
                own.update({index: each.clone() for index, each in theirs.items()})
        for message, tensor in arrived:
            computation.take(message, tensor.clone())

    def _leave_behind(self, position: int) -> None:
        """Puts what such a pass has left where captured passes read it."""
        assert self._computation is not None
        held = self._computation.held(self._actions[position].microbatch)
        for own, theirs in zip(held, self._captured.actions[position].held, strict=True):
            for index, place in theirs.items():
                if index in own:
                    place.copy_(own[index])

    def _backward(self, position: int, arrived: Outgoing) -> Outgoing:
        """Computes a backward pass, of a forward pass that went another way, as it is."""
        assert self._computation is not None
        captured = self._captured.actions[position]
        known: dict[torch.Tensor, torch.Tensor | None] = {
            each: each.grad for each in self._parameters
        }
        added: list[torch.Tensor] = []
        for each in self._parameters:
            each.grad = None
        self._take(position, arrived)
        with accumulations_seen(self._parameters, counting(added)):
            outgoing = self._computation.act(position, [])
        self._leave_behind(position)
        for leaf, gradient in known.items():
            self._add(leaf, gradient, leaf in captured.firsts)
        for parameter in added:
            note_added(parameter)
        self._added.update(added)
        self._end_if_last(position)
        return outgoing

    def _end_if_last(self, position: int) -> None:
        """Takes gradients away that nothing was added to, as all passes went another way."""
        if self._off and position == len(self._actions) - 1:
            for parameter in self._captured.gradients:
                if parameter not in self._added:
                    parameter.grad = None

    @staticmethod
    def _add(parameter: torch.Tensor, known: torch.Tensor | None, is_first: bool) -> None:
        """Adds what such a pass has given to the gradient that captured passes add to.

        Args:
            parameter: has the gradient of the pass.
            known: that of the passes before.
            is_first: the captured pass writes the gradient, and does not add to it.
        """
        own = parameter.grad
        parameter.grad = known
        if known is None:
            parameter.grad = own
        elif own is None:
            if is_first:
                known.zero_()
        elif is_first:
            known.copy_(own)
        else:
            known.add_(own)


def _is_confirmed(
    confirming: Confirming, promised: Promised, apart_from: Sequence[torch.Tensor]
) -> bool:
    """Whether Python that came to its end is as on the tape, and has let go of promises.

    Args:
        confirming: has compared it.
        promised: the tape.
        apart_from: promises that may be held.
    """
    if promised.are_held(apart_from):
        confirming.leave()
    confirming.confirmed()
    return not confirming.is_off


def counting(added: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Returns a hook of parameters that notes to which gradients something was added."""

    def note(parameter: torch.Tensor) -> None:
        added.append(parameter)

    note.only_counts = True  # type: ignore[attr-defined] # see weight_gradients.py
    return note


def capture(
    graphs: Graphs,
    passes: Passes,
    tapes: Tapes,
    inputs: Inputs,
    scales: Sequence[Scale],
    parameters: Sequence[nn.Parameter],
    draws: Sequence[Draws],
    random: StepDraws,
    exchanges: Exchanges,
    enter_pass: EnterPass,
    *,
    reuses_memory: bool,
) -> Replay:
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
        reuses_memory: whether that of messages is.

    Raises:
        Exception: something cannot be captured. Nothing has changed.
    """
    itinerary = passes.itinerary
    own = [[None if each is None else each.detach().clone() for each in one] for one in inputs]
    own_scales = [each.clone() if isinstance(each, torch.Tensor) else each for each in scales]
    outside = Outside(each for tape in tapes.values() for each in tape.outside.values())
    computation = ComputationOfTapes(passes, own, own_scales, tapes, random)
    incoming: dict[Message, torch.Tensor] = {}
    actions: list[CapturedAction] = []
    added: list[torch.Tensor] = []
    seen: set[torch.Tensor] = set()
    try:
        with (
            passes.putting_off(),
            accumulations_seen(parameters, counting(added)),
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
                with drawn.capturing(), graphs.capturing(drawn.generators) as graph, exchanging:
                    if reuses_memory:
                        arrived = _buffers(computation, itinerary.needs[position])
                    outgoing = computation.act(position, arrived)
                held = [
                    {index: unowned(each) for index, each in one.items()}
                    for one in computation.held(action.microbatch)
                ]
                firsts = set(added) - seen
                seen |= firsts
                actions.append(CapturedAction(graph, drawn, outgoing, added.copy(), firsts, held))
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
    gradients: dict[torch.Tensor, torch.Tensor] = {
        each: gradient for each, gradient in found.items() if gradient is not None
    }
    del computation, found
    if outside.has_changed():
        raise UnsupportedError("the memory or a hook of a tensor has changed since")
    captured = Captured(
        passes,
        own,
        own_scales,
        incoming,
        reuses_memory,
        actions,
        results,
        gradients,
        _users(gradients),
        exchanges.memory,
        promised_of(tapes),
        outside,
    )
    return Replay(captured, parameters, random, exchanges)


def promised_of(tapes: Tapes) -> dict[tuple[int, int], Promised]:
    """Returns tapes with promises in them."""
    by_tape: dict[int, Promised] = {}
    found = {}
    for key, tape in tapes.items():
        found[key] = by_tape[id(tape)] = Promised(tape, by_tape)
    return found


def _positions_before(actions: Sequence[Action]) -> list[int | None]:
    last: dict[int, int] = {}
    found: list[int | None] = []
    for position, action in enumerate(actions):
        found.append(last.get(action.microbatch))
        last[action.microbatch] = position
    return found


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


def _users(gradients: Mapping[torch.Tensor, torch.Tensor]) -> list[int]:
    """Returns how many tensors see the memory of each, and variables it."""
    return [
        users_of_memory(gradient) + sys.getrefcount(gradient) for gradient in gradients.values()
    ]
