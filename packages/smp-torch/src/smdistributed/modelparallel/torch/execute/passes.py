"""Computing the passes of one mini-batch: what each action of this rank does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.torch.compat.private.backward import put_own_hook
from smdistributed.modelparallel.torch.execute.compiled_backward import WaitingCalls
from smdistributed.modelparallel.torch.execute.cuts import Entrance, enter, gradient_at, leave
from smdistributed.modelparallel.torch.execute.itinerary import Itinerary
from smdistributed.modelparallel.torch.execute.late_values import late_value
from smdistributed.modelparallel.torch.execute.message import Message
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.execute.split_programs import SplitPlan, SplitProgram
from smdistributed.modelparallel.torch.execute.starts import Scale, start_of
from smdistributed.modelparallel.torch.execute.waiting_layers import putting_off
from smdistributed.modelparallel.torch.execute.weight_gradients import (
    WaitingGradients,
    put_off_in,
)
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.ir import HookedGradient
from smdistributed.modelparallel.torch.state.carried import CarriedObjects
from smdistributed.modelparallel.torch.tensor_parallel.backward_passes import (
    BackwardPasses,
    PassesAlone,
    Roots,
    Starts,
)
from smdistributed.modelparallel.torch.tensor_parallel.noted import Noted

#: For each microbatch, its tensor arguments and constants; None where this rank needs none.
Inputs = Sequence[Sequence[torch.Tensor | None]]
#: What leaves after an action.
Outgoing = list[tuple[Message, torch.Tensor]]
#: (what the forward pass kept, roots, starts)
_Backward = Callable[["_Saved", Roots, Starts], None]


class Passes:
    """What this rank computes in every mini-batch of a kind.

    Args:
        plans: the plan of each microbatch; microbatches of one shape share one.
        programs: for each microbatch, segment index -> function, for this rank's segments.
        itinerary: what this rank does.
        device: where it computes.
        together: the backward passes of the ranks that compute modules with this one.
        frees_cuts: hold no memory of what comes in and goes out until the backward pass.
        splits: how each plan is computed with pieces of sequences; empty: it is not.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        programs: Sequence[Mapping[int, Program | SplitProgram]],
        itinerary: Itinerary,
        device: torch.device,
        together: BackwardPasses | PassesAlone,
        *,
        frees_cuts: bool,
        splits: Sequence[SplitPlan] = (),
    ) -> None:
        self.plans = plans
        self.splits = splits
        self.programs = programs
        self.itinerary = itinerary
        self.device = device
        #: Types of those that autocast may be on for.
        self.devices = tuple(dict.fromkeys(("cpu", device.type)))
        self.together = together
        self.frees_cuts = frees_cuts
        self.values = [
            {
                value.index: splits[m].travelling(value) if splits else value
                for segment in plan.segments
                for value in segment.outputs
            }
            for m, plan in enumerate(plans)
        ]
        self.returned = [{value.index for value in plan.graph.returned} for plan in plans]
        self.roots = [[value.index for value in plan.graph.roots] for plan in plans]
        halves = any(each.kind is Kind.WEIGHT_GRADIENTS for each in itinerary.actions)
        leaves = {
            leaf for segments in programs for each in segments.values() for leaf in each.leaves
        }
        self._waiting_calls = WaitingCalls(leaves) if halves else None

    @contextlib.contextmanager
    def putting_off(self) -> Iterator[None]:
        """Inside, modules compute so that gradients of weights can wait, if the schedule has it."""
        with contextlib.ExitStack() as stack:
            if self._waiting_calls is not None:
                stack.enter_context(putting_off())
                stack.enter_context(self._waiting_calls.in_place())
            yield


@dataclass
class _Saved:
    """What a forward pass keeps for its backward pass.

    Attributes:
        inputs: what comes in, by the index of its value.
        outputs: what goes out.
        exchanged: within modules, with the ranks that compute them together.
    """

    inputs: list[tuple[int, torch.Tensor | Entrance]]
    outputs: list[tuple[int, torch.Tensor | GradientEdge]]
    exchanged: Noted | None


class Computation:
    """The passes of one mini-batch, and everything that lives for it.

    Args:
        passes: of its kind.
        inputs: of its microbatches.
        root_scales: for each microbatch, the gradient that its losses start with.

    Attributes:
        results: for each microbatch, the returned values that this rank made.
    """

    is_started = False  # it begins with the first action
    reuses_memory = False  # but when nobody needs it

    def __init__(self, passes: Passes, inputs: Inputs, root_scales: Sequence[Scale]) -> None:
        self._passes = passes
        self._plans = passes.plans
        self._programs = passes.programs
        self._inputs = inputs
        self._root_scales = root_scales
        num_microbatches = len(inputs)
        self._activations: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        self._gradients: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        self.results: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        self.carried = [CarriedObjects() for _ in range(num_microbatches)]
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._waiting: dict[tuple[int, int], WaitingGradients] = {}
        #: Tensors that segments left in objects with state, by their identity.
        self._left: list[dict[int, torch.Tensor]] = [{} for _ in range(num_microbatches)]
        #: That is differentiated.
        self._segment = -1
        #: What is done for an action, by its kind.
        self._compute: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENTS: self._input_gradients,
            Kind.WEIGHT_GRADIENTS: self._weight_gradients,
        }

    def buffer(self, message: Message) -> torch.Tensor:
        """Returns a buffer for a message that comes."""
        value = self._passes.values[message.microbatch][message.value]
        return value.wire_buffer(self._passes.device)

    def act(self, position: int, arrived: Outgoing) -> Outgoing:
        """Does an action.

        Args:
            position: of the action in the itinerary.
            arrived: the messages that it needs, and that no earlier one needed.

        Returns:
            the messages that leave after it.
        """
        itinerary = self._passes.itinerary
        action = itinerary.actions[position]
        for message, tensor in arrived:
            self.take(message, tensor)
        self._compute[action.kind](action)
        outgoing = self.outgoing(position)
        self.end_forwards(position)
        return outgoing

    def outgoing(self, position: int) -> Outgoing:
        """Returns the messages that leave after an action; lets go of what nobody needs."""
        itinerary = self._passes.itinerary
        outgoing = [(message, self._wire(message)) for message in itinerary.sends[position]]
        for value, microbatch in itinerary.releases[position]:
            self._activations[microbatch].pop(value, None)
        return outgoing

    def end_forwards(self, position: int) -> None:
        """Lets go of the objects of microbatches whose forward passes are over with an action."""
        for microbatch in self._passes.itinerary.last_forwards[position]:
            self.carried[microbatch].clear()
            self._left[microbatch].clear()

    def held(self, microbatch: int) -> list[dict[int, torch.Tensor]]:
        """Returns what passes of a microbatch have left for later ones: values and gradients."""
        return [self._activations[microbatch], self._gradients[microbatch]]

    def take(self, message: Message, arrived: torch.Tensor) -> None:
        """Takes a message that has arrived."""
        value = self._passes.values[message.microbatch][message.value]
        tensor = value.from_wire(arrived)
        if message.kind is Kind.FORWARD:
            self._activations[message.microbatch][message.value] = tensor
        else:
            _accumulate(self._gradients[message.microbatch], message.value, tensor)

    def _wire(self, message: Message) -> torch.Tensor:
        m = message.microbatch
        if message.kind is Kind.FORWARD:
            tensor = self._activations[m][message.value]
        else:
            tensor = self._gradients[m].pop(message.value)
        return self._passes.values[m][message.value].wire(tensor)

    def _forward(self, action: Action) -> None:
        arguments, entered = self.enter(action)
        with self.computing(action) as exchanged:
            results = self.run(action, arguments)
        self.leave(action, entered, exchanged, results)

    def enter(
        self, action: Action
    ) -> tuple[list[torch.Tensor], list[tuple[int, torch.Tensor | Entrance]]]:
        """Returns what a forward pass is given, and where gradients of that arrive."""
        plan = self._plans[action.microbatch]
        segment = plan.segments[action.segment]
        arguments = []
        entrances: list[tuple[int, torch.Tensor | Entrance]] = []
        for value in segment.inputs:
            tensor = self._activations[action.microbatch][value.index]
            if value.requires_grad and segment.index in plan.with_graph:
                tensor, entered = enter(tensor, frees=self._passes.frees_cuts)
                if value in plan.with_gradient:
                    entrances.append((value.index, entered))
            arguments.append(tensor)
        return arguments, entrances

    @contextlib.contextmanager
    def computing(self, action: Action) -> Iterator[Noted | None]:
        """Inside, a forward pass is computed; yields what it exchanges within modules."""
        with torch.set_grad_enabled(self.is_with_graph(action)), self.noting(action) as exchanged:
            yield exchanged

    def is_with_graph(self, action: Action) -> bool:
        """Whether a forward pass computes with gradients, but for what its code says."""
        return action.segment in self._plans[action.microbatch].with_graph

    def noting(self, action: Action) -> contextlib.AbstractContextManager[Noted | None]:
        """Inside, what a pass exchanges within modules is noted, if it has a backward one."""
        if action.segment in self._plans[action.microbatch].backward:
            return self._passes.together.noting()
        return contextlib.nullcontext()

    def run(self, action: Action, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns what a forward pass gives, by the Python of its modules."""
        m = action.microbatch
        return self._programs[m][action.segment].run(self._inputs[m], self.carried[m], *arguments)

    def leave(
        self,
        action: Action,
        entrances: list[tuple[int, torch.Tensor | Entrance]],
        exchanged: Noted | None,
        results: Sequence[torch.Tensor],
    ) -> None:
        """Keeps what a forward pass has given.

        Args:
            action: the pass.
            entrances: where its gradients arrive.
            exchanged: what it exchanged within modules.
            results: what it gave.
        """
        m = action.microbatch
        plan = self._plans[m]
        segment = plan.segments[action.segment]
        cut_outputs: list[tuple[int, torch.Tensor | GradientEdge]] = []
        for value, tensor in zip(segment.outputs, results, strict=True):
            shape = self._passes.values[m][value.index].shape
            if tensor.shape != shape or tensor.dtype is not value.dtype:
                raise UnsupportedError(
                    f"{value.node.name} gave a tensor {tuple(tensor.shape)} of {tensor.dtype} "
                    f"where the recording had {shape} of {value.dtype}: it depends on data, "
                    "so it cannot cross to another partition. Put the modules that use it on the "
                    "same partition."
                )
            if value in plan.with_gradient:
                # A start of its own has the shape of what it starts at.
                frees = self._passes.frees_cuts and value.index not in self._passes.roots[m]
                cut_outputs.append((value.index, leave(tensor, frees=frees)))
            if (hooked := plan.late.gradients.get(value)) is not None and tensor.requires_grad:
                run_hooks = functools.partial(self._hooked, m, hooked)
                put_own_hook(tensor.register_hook, run_hooks)
            detached = tensor.detach()
            if value.index in self._passes.returned[m] or value in plan.late.kept:
                splits = self._passes.splits
                whole = splits[m].whole(value, detached) if splits else detached
                self.results[m][value.index] = whole
            if value in plan.readers:
                self._activations[m][value.index] = detached
        if segment.index in plan.backward:
            self._saved[segment.index, m] = _Saved(entrances, cut_outputs, exchanged)
        if len(self._programs[m]) > 1:
            self._watch_carried(action)

    def _watch_carried(self, action: Action) -> None:
        """Has the gradients of what a segment left in objects with state stay in its own pass."""
        left = self._left[action.microbatch]
        for tensor in self.carried[action.microbatch].tensors():
            if tensor.grad_fn is not None and id(tensor) not in left:
                left[id(tensor)] = tensor
                check = functools.partial(self._check_segment, action.segment)
                put_own_hook(tensor.register_hook, check)

    def _backward(self, action: Action) -> None:
        def backward(saved: _Saved, roots: Roots, starts: Starts) -> None:
            self._passes.together.backward_of(saved.exchanged, roots, starts)

        self._differentiate(action, backward)

    def _input_gradients(self, action: Action) -> None:
        def backward(saved: _Saved, roots: Roots, starts: Starts) -> None:
            entered = [each for _, each in saved.inputs if isinstance(each, torch.Tensor)]
            waiting = WaitingGradients(roots, entered)
            with put_off_in(waiting):
                self._passes.together.backward_of(saved.exchanged, roots, starts)
            self._waiting[action.segment, action.microbatch] = waiting

        self._differentiate(action, backward)

    def _weight_gradients(self, action: Action) -> None:
        waiting = self._waiting.pop((action.segment, action.microbatch), None)
        if waiting is not None:
            waiting.compute()

    def _differentiate(self, action: Action, backward: _Backward) -> None:
        m = action.microbatch
        self._segment = action.segment
        root_scale = self._root_scales[m]
        gradients = self._gradients[m]
        saved = self._saved.pop((action.segment, m))
        tensors: list[torch.Tensor | GradientEdge] = []
        starts: list[torch.Tensor] = []
        for index, left in saved.outputs:
            gradient = gradients.pop(index, None)
            if isinstance(left, torch.Tensor):
                for _ in range(self._passes.roots[m].count(index)):
                    seed = start_of(left, root_scale)
                    gradient = seed if gradient is None else gradient + seed
                if not left.requires_grad:
                    continue
            if gradient is not None:
                tensors.append(left)
                starts.append(gradient)
        with _saying_what_is_in_progress():
            backward(saved, tensors, starts)
        for index, entered in saved.inputs:
            # A reader that the gradient does not reach still owes its peer an answer.
            _accumulate(gradients, index, gradient_at(entered))

    def _hooked(
        self, m: int, hooked: HookedGradient, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Called with the gradient of an activation that the script looks at, or changes."""
        results, plan = self.results[m], self._plans[m]
        results[hooked.given.index] = gradient.detach()
        if hooked.final is hooked.given:
            return None
        return late_value(plan, hooked.final, results, self._inputs[m])

    def _check_segment(self, segment: int, gradient: torch.Tensor) -> None:
        """Called with the gradient of a tensor that a segment left in an object with state.

        Raises:
            UnsupportedError: it comes from another segment.
        """
        if segment != self._segment:
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
