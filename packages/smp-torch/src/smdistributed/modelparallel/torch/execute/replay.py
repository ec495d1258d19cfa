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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.torch.compat.private.backward import accumulations_seen
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all
from smdistributed.modelparallel.torch.execute.captured import Captured, counting, users_of
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.passes import Computation, Inputs, Outgoing
from smdistributed.modelparallel.torch.execute.pieces import added_by, launch
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.taping import Draws
from smdistributed.modelparallel.torch.execute.weight_gradients import note_added
from smdistributed.modelparallel.torch.tape.confirming import KEPT, Confirming, Others
from smdistributed.modelparallel.torch.tape.promised import Promised


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
        other_way: where Python of a pass of the last mini-batch went another way; "" if none did.
    """

    wishes = 0  # exchanges of tensor parallelism are compared as they are made

    def __init__(
        self,
        captured: Captured,
        parameters: Sequence[nn.Parameter],
        random: Draws,
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
        self.other_way = ""
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
        for piece in captured.actions[0].pieces:
            piece.graph.replay()

    def fits(self, inputs: Inputs, scales: Sequence[Scale]) -> bool:
        """Whether a mini-batch differs from the captured one by the numbers in tensors alone."""
        return _looks(self._captured.inputs, self._captured.scales) == _looks(inputs, scales)

    @property
    def is_held(self) -> bool:
        """Whether somebody still has a gradient of the last mini-batch, or a view of it."""
        now = users_of(self._captured.gradients)
        return any(map(operator.gt, now, self._captured.users))

    def begin(self, inputs: Inputs, scales: Sequence[Scale], *, is_started: bool) -> None:
        """Takes the tensors of a mini-batch, which ``fits``; parameters have their gradients."""
        captured = self._captured
        self.is_started = is_started
        self._given = inputs
        self._computation = Computation(captured.passes, inputs, scales)
        self._off, self._added, self.other_way = set(), set(), ""
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
        # A reduction begins before the stream waits for what the next action needs.
        if position or not self.is_started:
            captured.draws.seed()
            launch(captured.pieces)
        self._added.update(added_by(captured.pieces))
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
            # Python may have come into code without gradients: what grad mode is is its business.
            exchanged.append(stack.enter_context(computation.noting(action)))
            inputs = [None if each is None else each.detach() for each in self._given[m]]
            return [*inputs, *(each if each.requires_grad else each.detach() for each in arguments)]

        confirming = Confirming(
            promised, passes.device, passes.devices, self._random, give, self._others
        )
        num_inputs = len(self._given[m])
        inputs = promised.given(0, num_inputs)
        arguments = promised.given(num_inputs, promised.tape.num_given - num_inputs)
        with (
            stack,
            self._renewed_after_errors(action),
            torch.set_grad_enabled(computation.is_with_graph(action)),
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
        self.other_way = self.other_way or confirming.other_way
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
        confirming.leave(KEPT)
    confirming.confirmed()
    return not confirming.is_off


def _positions_before(actions: Sequence[Action]) -> list[int | None]:
    last: dict[int, int] = {}
    found: list[int | None] = []
    for position, action in enumerate(actions):
        found.append(last.get(action.microbatch))
        last[action.microbatch] = position
    return found


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
