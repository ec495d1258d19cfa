"""Running a scheduled plan: one loop for every schedule."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction
from smdistributed.modelparallel.torch.execute.clock import clock_of
from smdistributed.modelparallel.torch.execute.compiled_backward import WaitingCalls
from smdistributed.modelparallel.torch.execute.cuts import Entrance, enter, gradient_at, leave
from smdistributed.modelparallel.torch.execute.itinerary import Itinerary, Message
from smdistributed.modelparallel.torch.execute.links import Links, Transfer
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.execute.starts import Scale, start_of
from smdistributed.modelparallel.torch.execute.waiting_layers import putting_off
from smdistributed.modelparallel.torch.execute.weight_gradients import (
    WaitingGradients,
    put_off_in,
)
from smdistributed.modelparallel.torch.plan.segments import Plan
from smdistributed.modelparallel.torch.record.carried import Carried, CarriedObjects


@dataclass
class _Saved:
    """What a forward pass keeps for its backward pass."""

    inputs: list[tuple[int, torch.Tensor | Entrance]]
    outputs: list[tuple[int, torch.Tensor | GradientEdge]]


class Executor:
    """Runs the actions of this rank.

    Args:
        plans: the plan of each microbatch; microbatches of one shape share one.
        programs: for each microbatch, segment index -> function, for this rank's segments.
        itinerary: what this rank does.
        links: the way to the other ranks.
        device: where it computes.
        frees_cuts: hold no memory of what comes in and goes out until the backward pass.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        programs: Sequence[dict[int, Program]],
        itinerary: Itinerary,
        links: Links,
        device: torch.device,
        *,
        frees_cuts: bool = False,
    ) -> None:
        self._plans = plans
        self._programs = programs
        self._itinerary = itinerary
        self._links = links
        self._device = device
        self._clock = clock_of(device)
        self._frees_cuts = frees_cuts
        self._values = [
            {value.index: value for segment in plan.segments for value in segment.outputs}
            for plan in plans
        ]
        self._returned = [{value.index for value in plan.graph.returned} for plan in plans]
        self._roots = [[value.index for value in plan.graph.roots] for plan in plans]
        #: What is done for an action, by its kind.
        self._passes: dict[Kind, Callable[[_StepState, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENTS: self._input_gradients,
            Kind.WEIGHT_GRADIENTS: self._weight_gradients,
        }
        halves = any(each.kind is Kind.WEIGHT_GRADIENTS for each in itinerary.actions)
        leaves = {
            leaf for segments in programs for each in segments.values() for leaf in each.leaves
        }
        self._waiting_calls = WaitingCalls(leaves) if halves else None

    @property
    def actions(self) -> tuple[Action, ...]:
        """What this rank does, in order."""
        return self._itinerary.actions

    def run(
        self,
        inputs: Sequence[Sequence[torch.Tensor | None]],
        root_scales: Sequence[Scale],
        enter_pass: Callable[[Kind, int], None],
    ) -> tuple[list[dict[int, torch.Tensor]], list[Any]]:
        """Runs one mini-batch.

        Args:
            inputs: for each microbatch, its tensor arguments; None where this rank needs none.
            root_scales: for each microbatch, the gradient that its losses start with.
            enter_pass: called before each action with its direction and microbatch.

        Returns:
            For each microbatch, the returned values that this rank made; and what ``timed`` makes
            times of.

        Raises:
            CommError: a peer died or did not take part in time.
        """
        step = _StepState(inputs, root_scales)
        with self._putting_off():
            marks = self._run(step, enter_pass)
        for transfer in step.outgoing:
            transfer.wait()
        return step.results, marks

    @contextlib.contextmanager
    def _putting_off(self) -> Iterator[None]:
        """Inside, modules compute so that gradients of weights can wait, if the schedule has it."""
        with contextlib.ExitStack() as stack:
            if self._waiting_calls is not None:
                stack.enter_context(putting_off())
                stack.enter_context(self._waiting_calls.in_place())
            yield

    def _run(self, step: _StepState, enter_pass: Callable[[Kind, int], None]) -> list[Any]:
        marks = []
        self._clock.begin()
        mark = self._clock.mark
        needs = self._itinerary.needs
        # Posted one action ahead, a transfer overlaps with an action. On a GPU a waiting receive
        # would hold multiprocessors, so it is posted at the point of need.
        ahead = 1 if self._device.type == "cpu" else 0
        posts = iter(self._itinerary.posts)
        for receives in itertools.islice(posts, ahead):
            self._post(step, receives)
        for position, action in enumerate(self._itinerary.actions):
            self._post(step, next(posts, ()))
            for message in needs[position]:
                self._take(step, message)
            enter_pass(action.kind, action.microbatch)
            start = mark()
            self._passes[action.kind](step, action)
            marks.append((start, mark()))
            self._send(step, position)
        return marks

    def timed(self, marks: Sequence[Any]) -> list[TimedAction]:
        """Returns the actions with the times of a run, in seconds since the epoch."""
        times = iter(self._clock.seconds([mark for pair in marks for mark in pair]))
        return [TimedAction(action, next(times), next(times)) for action in self._itinerary.actions]

    def _post(self, step: _StepState, receives: Sequence[Message]) -> None:
        for message in receives:
            value = self._values[message.microbatch][message.value]
            buffer = value.wire_buffer(self._device)
            step.incoming[message] = self._links.receive(buffer, message.source)

    def _take(self, step: _StepState, message: Message) -> None:
        value = self._values[message.microbatch][message.value]
        tensor = value.from_wire(step.incoming.pop(message).wait())
        if message.kind is Kind.FORWARD:
            step.activations[message.microbatch][message.value] = tensor
        else:
            _accumulate(step.gradients[message.microbatch], message.value, tensor)

    def _forward(self, step: _StepState, action: Action) -> None:
        m = action.microbatch
        plan = self._plans[m]
        segment = plan.segments[action.segment]
        activations = step.activations[m]
        has_backward = segment.index in plan.backward
        arguments = []
        cut_inputs: list[tuple[int, torch.Tensor | Entrance]] = []
        for value in segment.inputs:
            tensor = activations[value.index]
            if value.requires_grad and has_backward:
                tensor, entered = enter(tensor, frees=self._frees_cuts)
                if value in plan.with_gradient:
                    cut_inputs.append((value.index, entered))
            arguments.append(tensor)
        with torch.set_grad_enabled(has_backward):
            results = self._programs[m][segment.index].run(
                step.inputs[m], step.carried[m], *arguments
            )
        cut_outputs: list[tuple[int, torch.Tensor | GradientEdge]] = []
        for value, tensor in zip(segment.outputs, results, strict=True):
            if tensor.shape != value.shape or tensor.dtype is not value.dtype:
                raise UnsupportedError(
                    f"{value.node.name} gave a tensor {tuple(tensor.shape)} of {tensor.dtype} "
                    f"where the recording had {value.shape} of {value.dtype}: it depends on data, "
                    "so it cannot cross to another partition. Put the modules that use it on the "
                    "same partition."
                )
            if value in plan.with_gradient:
                # A start of its own has the shape of what it starts at.
                frees = self._frees_cuts and value.index not in self._roots[m]
                cut_outputs.append((value.index, leave(tensor, frees=frees)))
            detached = tensor.detach()
            if value.index in self._returned[m]:
                step.results[m][value.index] = detached
            if value in plan.readers:
                activations[value.index] = detached
        if has_backward:
            step.saved[segment.index, m] = _Saved(cut_inputs, cut_outputs)
        if len(self._programs[m]) > 1:
            self._watch_carried(step, action)

    def _watch_carried(self, step: _StepState, action: Action) -> None:
        """Has the gradients of what a segment left in objects with state stay in its own pass."""
        left = step.left[action.microbatch]
        for tensor in step.carried[action.microbatch].tensors():
            if tensor.grad_fn is not None and id(tensor) not in left:
                left[id(tensor)] = tensor
                check = functools.partial(step.check_segment, action.segment)
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    def _backward(self, step: _StepState, action: Action) -> None:
        self._differentiate(step, action, torch.autograd.backward)

    def _input_gradients(self, step: _StepState, action: Action) -> None:
        def backward(roots: Any, starts: Any) -> None:
            waiting = WaitingGradients(roots)
            with put_off_in(waiting):
                torch.autograd.backward(roots, starts)
            step.waiting[action.segment, action.microbatch] = waiting

        self._differentiate(step, action, backward)

    def _weight_gradients(self, step: _StepState, action: Action) -> None:
        waiting = step.waiting.pop((action.segment, action.microbatch), None)
        if waiting is not None:
            waiting.compute()

    def _differentiate(
        self, step: _StepState, action: Action, backward: Callable[[Any, Any], None]
    ) -> None:
        m = action.microbatch
        step.segment = action.segment
        root_scale = step.root_scales[m]
        gradients = step.gradients[m]
        saved = step.saved.pop((action.segment, m))
        tensors: list[torch.Tensor | GradientEdge] = []
        starts: list[torch.Tensor] = []
        for index, left in saved.outputs:
            gradient = gradients.pop(index, None)
            if isinstance(left, torch.Tensor):
                for _ in range(self._roots[m].count(index)):
                    seed = start_of(left, root_scale)
                    gradient = seed if gradient is None else gradient + seed
                if not left.requires_grad:
                    continue
            if gradient is not None:
                tensors.append(left)
                starts.append(gradient)
        if tensors:
            with _saying_what_is_in_progress():
                backward(tensors, starts)
        for index, entered in saved.inputs:
            # A reader that the gradient does not reach still owes its peer an answer.
            _accumulate(gradients, index, gradient_at(entered))

    def _send(self, step: _StepState, position: int) -> None:
        sends = self._itinerary.sends[position]
        outgoing = step.outgoing
        # They end about in the order in which they began: asking the first ones is enough.
        while outgoing and outgoing[0].is_done:
            outgoing.popleft()
        for message in sends:
            m = message.microbatch
            if message.kind is Kind.FORWARD:
                tensor = step.activations[m][message.value]
            else:
                tensor = step.gradients[m].pop(message.value)
            wire = self._values[m][message.value].wire(tensor)
            outgoing.append(self._links.send(wire, message.target))
        for value, microbatch in self._itinerary.releases[position]:
            step.activations[microbatch].pop(value, None)
        for microbatch in self._itinerary.last_forwards[position]:
            step.carried[microbatch].clear()
            step.left[microbatch].clear()


class _StepState:
    """Everything that lives for one mini-batch.

    Args:
        inputs: for each microbatch, its tensor arguments.
        root_scales: for each microbatch, the gradient that its losses start with.
    """

    def __init__(
        self, inputs: Sequence[Sequence[torch.Tensor | None]], root_scales: Sequence[Scale]
    ) -> None:
        self.inputs = inputs
        self.root_scales = root_scales
        num_microbatches = len(inputs)
        self.activations: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        self.gradients: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        self.results: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        self.carried = [CarriedObjects(Carried.copy) for _ in range(num_microbatches)]
        self.saved: dict[tuple[int, int], _Saved] = {}
        self.waiting: dict[tuple[int, int], WaitingGradients] = {}
        #: Tensors that segments left in objects with state, by their identity.
        self.left: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        #: That is differentiated.
        self.segment = -1
        self.incoming: dict[Message, Transfer] = {}
        self.outgoing: collections.deque[Transfer] = collections.deque()

    def check_segment(self, segment: int, gradient: torch.Tensor) -> None:
        """Called with the gradient of a tensor that a segment left in an object with state.

        Raises:
            UnsupportedError: it comes from another segment.
        """
        if segment != self.segment:
            raise UnsupportedError(
                "a module used an activation that another one had left in an object (a cache, "
                "say), in an earlier call of the model or before the pipeline came back to this "
                "partition, and its gradient cannot go back there. Detach what goes into the "
                "object, return it and pass it on as a tensor, or make one call of both."
            )


def _accumulate(gradients: dict[int, torch.Tensor], index: int, gradient: torch.Tensor) -> None:
    known = gradients.get(index)
    gradients[index] = gradient if known is None else known + gradient


@contextlib.contextmanager
def _saying_what_is_in_progress() -> Iterator[None]:
    """Adds the remedy to torch's error about tensors that were changed before a backward pass.

    Raises:
        UnsupportedError: instead of it.
    """
    try:
        yield
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise UnsupportedError(
            f"{error}\nIn a pipeline, later microbatches run forward before this one runs "
            "backward. A module that keeps what it computes with replaces it (self.x = self.x + y) "
            "instead of changing it in place."
        ) from error
