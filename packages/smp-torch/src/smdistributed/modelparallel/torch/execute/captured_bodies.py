"""Bodies that were captured as CUDA graphs from their tapes, and are launched as Python confirms.

The Python of a body runs in every mini-batch, answered from its tape; where it has come to its end
as recorded, on all ranks that exchange in it, the graph of the whole microbatch is launched. Where
it goes another way, this microbatch and those after it are computed as they are: a graph may read
what the one before it has left.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import (
    accumulations_seen,
    saved_tensors_hooks,
)
from smdistributed.modelparallel.torch.compat.private.memory import unowned
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all
from smdistributed.modelparallel.torch.execute.bodies import Arguments, Body, BodyTape, Call
from smdistributed.modelparallel.torch.execute.captured import (
    Draws,
    Exchanges,
    users_of,
)
from smdistributed.modelparallel.torch.execute.graphs import Graphs
from smdistributed.modelparallel.torch.execute.pieces import (
    Foreseen,
    Piece,
    Pieces,
    added_by,
    launch,
)
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.execute.taping import Draws as StepDraws
from smdistributed.modelparallel.torch.sharding.agreement import Course
from smdistributed.modelparallel.torch.sharding.gradients import SoFar
from smdistributed.modelparallel.torch.sharding.home import ShardedModel
from smdistributed.modelparallel.torch.tape.confirming import KEPT, Confirming, Others
from smdistributed.modelparallel.torch.tape.outside import Outside
from smdistributed.modelparallel.torch.tape.promised import Promised
from smdistributed.modelparallel.torch.tape.running import run
from smdistributed.modelparallel.torch.tape.tape import Made
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import slices_as_they_are
from smdistributed.modelparallel.torch.tensors.nested import fill, template, tensors_in


class CapturedBody(NamedTuple):
    """A microbatch that was captured.

    Attributes:
        tape: what was taken down.
        promised: with promises in it.
        pieces: what it computes.
        draws: its random numbers.
        inputs: copies of its tensor arguments, which are read.
        outputs: what it gives; others may have the memory later.
        firsts: the parameters to whose gradients it adds, and no microbatch before it.
        so_far: of each model in shards, what there is of gradients after it.
    """

    tape: BodyTape
    promised: Promised
    pieces: list[Piece]
    draws: Draws
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    firsts: list[torch.Tensor]
    so_far: list[SoFar]


@dataclass
class CapturedBodies:
    """The microbatches of one kind of mini-batch, as they were captured.

    Attributes:
        bodies: in order.
        shards: the models in shards.
        gradients: those that a mini-batch gives to parameters that had none.
        sums: those that it gives to shards.
        users: of each of both, how many see it if nobody else holds it.
        outside: what the kernels read that no body was given.
        wishes: a sum that ranks have in common which exchange the same.
        exchanged: the memory that exchanges of slices go by.
        other_way: where Python of the last mini-batch went another way; "" if it did not.
    """

    bodies: list[CapturedBody]
    shards: Sequence[ShardedModel]
    gradients: dict[torch.Tensor, torch.Tensor]
    sums: dict[Any, torch.Tensor]
    users: list[int]
    outside: Outside
    wishes: int
    exchanged: object
    other_way: str = ""

    @property
    def has_moved(self) -> bool:
        """Whether something is elsewhere that the kernels read."""
        return self.outside.has_changed()

    @property
    def is_held(self) -> bool:
        """Whether somebody still has a gradient of the last mini-batch, or a view of it."""
        return any(map(operator.gt, self._users(), self.users))

    def _users(self) -> list[int]:
        return [*users_of(self.gradients), *users_of(self.sums)]


def capture_bodies(
    graphs: Graphs,
    tapes: Sequence[BodyTape],
    calls: Sequence[Call],
    parameters: Sequence[nn.Parameter],
    shards: Sequence[ShardedModel],
    course: Course | None,
    exchanges: Exchanges,
    draws: Sequence[Draws],
    random: StepDraws,
    devices: tuple[str, ...],
    enter: Callable[[int], None],
    foreseen: Sequence[Foreseen],
    runs: TapedRuns,
) -> CapturedBodies:
    """Captures the bodies of a mini-batch from their tapes.

    No Python of them runs, and nothing is computed. What ranks of a sharding group agree on is
    assumed: that all of them wish what this one does; ``wishes`` tells whether they did.

    Args:
        graphs: captures.
        tapes: of the microbatches.
        calls: their arguments.
        parameters: that are whole; they have no gradients, and no hooks but such as count.
        shards: the models in shards, without gradients.
        course: of the sharding group, if there are any.
        exchanges: of modules in slices.
        draws: of each microbatch.
        random: of the step.
        devices: the types of those that autocast may be on for.
        enter: called with the number of each microbatch before it.
        foreseen: know when gradients leave that are reduced.
        runs: compile what lies between products.

    Raises:
        Exception: something cannot be captured. Nothing has changed.
    """
    _check_known(tapes, parameters, shards)
    outside = Outside(each for one in tapes for each in one.tape.outside.values())
    different = {each.tape for each in tapes}
    computed = {each: runs.of(each) for each in different}
    bodies: list[CapturedBody] = []
    pieces = Pieces(foreseen)
    seen: set[torch.Tensor] = set()
    assumed: list[tuple[int, ...]] = []
    for model in shards:
        model.residency.empty()  # what is gathered is gathered in the graph
    if course is not None:
        course.assumed = assumed
    try:
        with accumulations_seen(parameters, pieces.hook()), graphs.session():
            for number, (taken, call, drawn) in enumerate(zip(tapes, calls, draws, strict=True)):
                inputs = [each.detach().clone() for each in Arguments(call).tensors]
                enter(number)
                with (
                    drawn.capturing(),
                    graphs.capturing(drawn.generators) as capturing,
                    exchanges.capturing(is_first=True, is_last=True),
                    contextlib.ExitStack() as stack,
                ):
                    pieces.begin(capturing, drawn.left)
                    for model in shards:
                        stack.enter_context(model.capturing(differentiates=taken.differentiates))
                    tape = computed[taken.tape]
                    results, _ = run(tape, inputs, _of_earlier_pass, random, devices)
                    outputs = [each.detach() for each in results]
                    del results
                captured = pieces.end()
                firsts = [each for each in dict.fromkeys(added_by(captured)) if each not in seen]
                seen.update(firsts)
                bodies.append(
                    CapturedBody(
                        taken,
                        Promised(taken.tape, {}),
                        captured,
                        drawn,
                        inputs,
                        list(map(unowned, outputs)),
                        firsts,
                        [model.gradients.so_far for model in shards],
                    )
                )
                del outputs
        found = {each: each.grad for each in parameters}
    finally:
        if course is not None:
            course.assumed = None
        for parameter in parameters:
            parameter.grad = None
        for model in shards:
            model.forget()
    gradients: dict[torch.Tensor, torch.Tensor] = {
        each: gradient for each, gradient in found.items() if gradient is not None
    }
    del found
    if outside.has_changed():
        raise UnsupportedError("the memory or a hook of a tensor has changed since")
    sums: dict[Any, torch.Tensor] = {
        (place, unit): total
        for place, so_far in enumerate(bodies[-1].so_far)
        for unit, total in so_far.sums.items()
    }
    wishes = zlib.crc32(repr(assumed).encode())
    whole = CapturedBodies(bodies, shards, gradients, sums, [], outside, wishes, exchanges.memory)
    whole.users = whole._users()
    return whole


def _check_known(
    tapes: Sequence[BodyTape],
    parameters: Sequence[torch.Tensor],
    shards: Sequence[ShardedModel],
) -> None:
    """Raises if a body adds to the gradient of a tensor whose gradient nobody would take back."""
    known = set(map(id, parameters))
    known |= {id(each) for model in shards for unit in model.units for each in unit.parameters}
    for each in (each for one in tapes if one.differentiates for each in one.tape.outside.values()):
        if each.requires_grad and id(each) not in known:
            raise UnsupportedError("a tensor that gets a gradient belongs to no model")


def _of_earlier_pass(reference: object) -> torch.Tensor:
    raise AssertionError("a body is all there is of a microbatch")


class ConfirmedBodies:
    """Bodies of one mini-batch whose Python confirms what was captured; see ``Bodies``.

    Args:
        captured: the bodies; what they ask ahead is answered as it was.
        device: where they compute.
        devices: the types of those that autocast may be on for.
        random: of the step.
        course: of the sharding group; None without.
        others: the ranks that compute modules in slices with this one.
        begin_pass: does what comes before a backward pass that Python did not begin itself.

    Attributes:
        is_off: the Python of a microbatch went another way, on some rank.
    """

    def __init__(
        self,
        captured: CapturedBodies,
        device: torch.device,
        devices: tuple[str, ...],
        random: StepDraws,
        course: Course | None,
        others: Others,
        begin_pass: Callable[[], None],
    ) -> None:
        self._captured = captured
        self._device = device
        self._devices = devices
        self._random = random
        self._course = course
        self._others = others
        self._begin_pass = begin_pass
        self._next = 0
        self.is_off = False
        captured.other_way = ""
        if course is not None:
            course.is_left = False

    def run(self, call: Call, body: Body) -> Any:
        """See ``Bodies``."""
        if self.is_off:
            return body(call)
        captured = self._captured.bodies[self._next]
        self._next += 1
        is_confirmed = False
        try:
            is_confirmed, result = self._confirmed(captured, call, body)
        finally:
            if not is_confirmed:
                self.is_off = True
                self._captured.other_way = self._captured.other_way or "it raised an error"
                captured.promised.renew()
        if not is_confirmed:
            return result
        with slices_as_they_are():
            return self._launched(captured, Arguments(call).tensors, result)

    def _confirmed(self, captured: CapturedBody, call: Call, body: Body) -> tuple[bool, Any]:
        """Runs the Python of a body.

        Returns:
            whether it did as recorded, and what it gave: then with the numbers of promises in the
            places of tensors.
        """
        arguments = Arguments(call)
        promised = captured.promised
        confirming = Confirming(
            promised,
            self._device,
            self._devices,
            self._random,
            lambda: [each.detach() for each in arguments.tensors],
            # Those with other shards are heard of when they are needed, or at the end.
            self._others,
            known_hooks=saved_tensors_hooks(),
            computing=slices_as_they_are,
        )
        with self._random.seen_by(confirming), confirming.confirming():
            result = body(arguments.with_others(promised.given(0, len(arguments.tensors))))
            confirming.end(tensors_in(result))
            if confirming.is_off:
                self._captured.other_way = confirming.other_way
                self._agreed(confirming)
                return False, result
            given = template(result, lambda each: Made(promised.numbers[id(each)]), lambda obj: obj)
            del result
            if promised.are_held([]):
                confirming.leave(KEPT)
            if not self._agreed(confirming):
                confirming.leave_if_on("that of another rank did")
                self._captured.other_way = confirming.other_way
                return False, fill(given, Made, lambda made: promised.promises[made.number])
        return True, given

    def _launched(self, captured: CapturedBody, given: Sequence[torch.Tensor], result: Any) -> Any:
        """Launches what was captured; returns what the body gave."""
        with torch.no_grad():
            if given:
                copy_all(captured.inputs, given)
            for parameter in captured.firsts:
                # Another object each time: a script may give it other memory, or attributes.
                parameter.grad = self._captured.gradients[parameter].detach()
            captured.draws.seed()
            if captured.tape.is_inside:
                self._begin_pass()
            launch(captured.pieces)
            outputs = {
                reference.number: output.clone()
                for reference, output in zip(
                    captured.tape.tape.results, captured.outputs, strict=True
                )
            }
        if captured.tape.differentiates:
            for model, so_far in zip(self._captured.shards, captured.so_far, strict=True):
                model.launched(so_far)
        return fill(result, Made, lambda made: outputs[made.number])

    def _agreed(self, confirming: Confirming) -> bool:
        """Whether the Python of all ranks that launch together did as recorded."""
        if self._course is None:
            confirming.confirmed()
            return not confirming.is_off
        with confirming.aside():
            return self._course.confirm(is_as_recorded=not confirming.is_off)

    def differentiating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Bodies``."""
        return contextlib.nullcontext()

    def refuse(self, why: str) -> None:
        """See ``Bodies``."""
