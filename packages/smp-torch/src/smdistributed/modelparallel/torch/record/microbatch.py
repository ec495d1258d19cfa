"""One microbatch whose Python runs on fakes: how far it is in the trace, and what it has met."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, FakeTensorMode
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.leaves.modules import ModuleCalls, Randomness
from smdistributed.modelparallel.torch.record.leaves.repetition import Repetition
from smdistributed.modelparallel.torch.record.leaves.runs import LeafRun, LeafRuns
from smdistributed.modelparallel.torch.record.leaves.spans import Span
from smdistributed.modelparallel.torch.record.questions.ahead import Ahead
from smdistributed.modelparallel.torch.record.questions.decisions import Decisions
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.record.questions.question import Question
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.constants import Constants
from smdistributed.modelparallel.torch.record.trace.overwritten import check_not_overwritten
from smdistributed.modelparallel.torch.record.trace.tree import (
    Constant,
    Entry,
    EntryKind,
    Trace,
)
from smdistributed.modelparallel.torch.record.trace.values import Values
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.contents import Contents, copied
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.switches import Positions, Settings, settings
from smdistributed.modelparallel.torch.tensors.nested import (
    is_plain_value,
    template,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

#: By what a loss counts, of the model whose module is given; None: the step knows when it runs.
ShareOf = Callable[[nn.Module], float | None]


@dataclass(frozen=True)
class Context:
    """What all microbatches of a recorder share.

    Attributes:
        scene: the models.
        mode: of the fakes.
        device: where the step will run.
        random: the random numbers of the step.
        meter: counts what runs on fakes do.
        switches: of torch, as they were outside the step.
        state: where the run is.
        calls: of modules.
    """

    scene: Scene
    mode: FakeTensorMode
    device: torch.device
    random: Randomness
    meter: Meter
    switches: Positions
    state: RunState
    calls: ModuleCalls

    def settings(self) -> Settings:
        """Returns how torch's switches are set now."""
        devices = ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)
        return settings(devices, self.switches)


class Array:
    """An array of NumPy that code between modules was given for a tensor: of memory of its own.

    Args:
        array: the array.
        where: who has asked for it.
        span: the call of a module that has, while modules are open; else None.
    """

    def __init__(self, array: Any, where: str, span: Span | None) -> None:
        self._array = array
        self._content = array.tobytes()
        self._where = where
        self._span = span

    def check(self) -> None:
        """Refuses what was written to it, but of a module that stays whole and does it for real.

        Raises:
            UnsupportedError: something was.
        """
        if self._array.tobytes() == self._content:
            return
        error = UnsupportedError(
            f"{self._where} has given an array of NumPy, which was written to, in code that is "
            "split over partitions: the tensor would not show it. Write to the tensor inside a "
            "module that stays whole, or between two calls of step functions."
        )
        if self._span is None:
            raise error
        self._span.refused = lambda name: error


class Microbatch:
    """See the top.

    Args:
        context: what it shares with others.
        trace: of microbatches like this one.
        call: the arguments of the user's function.
        decisions: answers questions about data.
        buffer: returns what a buffer of a split module holds when the microbatch begins.
        share_of: by what a loss of a model counts in it.

    Attributes:
        real_inputs: the tensors of the arguments; fakes where they are not known.
        at: the last entry of the trace that it has come to.
        log: the entries up to there.
        new: those that the trace does not have, while modules are open; else None.
        values: what stands for what, once calls are made on fakes; else None.
        constants: the tensors that it has read besides its arguments.
        objects: what stands in the places of objects with state.
        contents: what is known to be in them.
        aliases: by id, fakes that a leaf has made anew, and those that stand for the same in the
            trace.
        stood_in: by id, fakes for tensors that modules have returned without computing them from
            fakes.
        slots_set: by memory, the parameters and buffers that modules have put it in, while these
            are open.
        specs: by id, how tensors look now that calls have changed the looks of.
        grown: what leaves have added to containers that others see.
        pending: the numbers that were taken from activations.
        functional: modules that code has called with other parameters or buffers than their own, in
            the order of their calls.
        arrays: of NumPy that code between modules was given.
        overwritten: the memory that a leaf has written to since it called the hook that runs now.
        given: the question that was asked last without an entry for its answer, and the answer.
        ahead: asks questions about activations.
        spans: the calls of modules, while these are open.
        span: the innermost one in progress.
        leaf_runs: runs leaves.
        repetition: of the leaf that runs once more to see whether it does the same; else None.
    """

    def __init__(
        self,
        context: Context,
        trace: Trace,
        call: tuple[Sequence[Any], Mapping[str, Any]],
        decisions: Decisions,
        buffer: Callable[[nn.Module, str], Any],
        share_of: ShareOf,
    ) -> None:
        self._context = context
        self._buffer = buffer
        self.share_of = share_of
        self.trace = trace
        self.call = call
        self.decisions = decisions
        self.real_inputs = tensors_in(call)
        self.at = trace.start
        self.constants = Constants()
        self.pending: list[PendingNumber] = []
        self.functional: dict[nn.Module, None] = {}
        self.arrays: list[Array] = []
        self.given: tuple[Question, Any] | None = None
        self.ahead: Ahead | None = None
        self.overwritten: frozenset[int] = frozenset()
        self._generators = context.random.state()
        self.let_go()

    def let_go(self) -> None:
        """Keeps nothing that holds fakes."""
        self.values: Values | None = None
        self.objects: dict[Carried, Any] = {}
        self.contents: dict[Carried, Contents] = {}
        self.aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stood_in: dict[int, torch.Tensor] = {}
        self.slots_set: dict[int, frozenset[tuple[nn.Module, str]]] = {}
        self.specs: dict[int, TensorSpec] = {}
        self.grown: list[Growth] = []
        self.log: list[Entry] = []
        self.new: list[Entry] | None = None
        self.spans: list[Span] = []
        self.span: Span | None = None
        self.leaf_runs = self.new_runs()
        self.repetition: Repetition | None = None

    # What is there

    def calls_made_again(self) -> Iterator[Entry]:
        """Yields the calls of modules that a backward pass makes again, so far."""
        calls = [each for each in self.log if each.kind is EntryKind.LEAF]
        for entry in (*calls, *(span.entry for span in self.spans)):
            if entry.checkpoints or entry.region is not None:
                yield entry

    def new_values(self, changed: Container[Slot] = ()) -> Values:
        """Returns what stands for what at the start; see ``Values``."""
        context = self._context
        return Values(context.scene, context.state, self.trace, context.calls.where, changed)

    def new_runs(self) -> LeafRuns:
        """Returns what runs leaves."""
        context = self._context
        return LeafRuns(context.scene, context.state, context.calls, context.random, self.fake)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what stands for a tensor: of a model's own tensors the fake."""
        if id(tensor) in self.aliases:
            return self.aliases[id(tensor)][1]
        fake = self._context.scene.fake_of(tensor)
        return tensor if fake is None else fake

    def look_as_after(self, entry: Entry) -> bool:
        """Takes note of how tensors look after a call; returns whether their fakes look so."""
        self.specs.update(entry.specs)
        with self._context.state.pausing():  # else it is told what it should find
            return all(entry.specs[id(each)] == TensorSpec.of(each) for each in entry.changed)

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor requires a gradient now; its fake may know of a later moment."""
        spec = self.specs.get(id(tensor)) or self.trace.first_spec(tensor)
        return spec.requires_grad

    def is_seeded(self) -> bool:
        """Whether the step has seeded torch's own generators and means those numbers."""
        random = self._context.random
        return random.state() != random.expected_state(self._generators)

    def given_for(self, placeholder: Carried | Constant) -> Any:
        """Returns what stands in this microbatch in the place of a placeholder."""
        if isinstance(placeholder, Constant):
            return self.constants.given(placeholder)
        return copied(self.objects[placeholder])

    def ask(self, question: Question) -> Any:
        """Returns the answer to a question about data."""
        given = dict(enumerate(self.real_inputs))
        for position, constant in question.constants.items():
            given[position] = self.constants.known(constant, question.where)
        context = self._context
        if question.before is not None:
            assert self.ahead is not None
            return self.ahead.answer(question, given)
        # What one rank computes for an answer is no cost of the model: all must count alike.
        with context.calls.uncounted():
            return self.decisions.answer(
                lambda: question.answer(given, context.random.drawing, self._buffer),
                question.where,
            )

    def check_known(self, obj: Any, module: nn.Module | None) -> None:
        """Has a module kept whole that has a tensor that no recorded call made."""
        assert self.values is not None
        strangers = list(filter(self.values.is_stranger, tensors_in(obj)))
        if module is not None and strangers:
            reason = "it makes a tensor by a call that cannot be recorded"
            self._context.calls.keep_whole(module, reason)
            for tensor in strangers:
                self.values.of(tensor)  # the same tensor tells nothing about modules around

    def number(self, entry: Entry) -> PendingNumber:
        """Returns what stands for the number in a tensor that is not computed yet."""
        assert self.ahead is not None
        tensor, where = entry.outputs[0][1], f"{entry.name} in {entry.where}"
        number = PendingNumber(tensor=tensor, where=where, ask=self.ahead.number)
        self.pending.append(number)
        return number

    def call_inside(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a module on fakes, where a leaf is the module or calls it."""
        result = self._context.calls.call(call, module, *args, **kwargs)
        self.leaf_runs.note_call(module, args, kwargs, result)
        return result

    def note_again(self, entry: Entry, run: LeafRun) -> None:
        """Takes note that what a leaf has made again stands for what it made before."""
        known = dict[Any, torch.Tensor]((*entry.outputs, *entry.inner.values()))
        for place, made in (*tensor_paths(run.result), *run.inner.values()):
            if place in known:
                self.aliases[id(made)] = made, known[place]

    # What is written down

    def go_live(self) -> Values:
        """Leaves the trace: from here on calls are made on fakes and written down."""
        if self.values is None:
            values = self.new_values()
            for entry in self.log:
                values.take(entry)
            self.values = values
            if self._context.state.is_open:
                self.new = []
        return self.values

    def add(self, entry: Entry) -> None:
        """Writes an entry down."""
        entry.is_of_hook = self._context.state.outside > 0
        if self.overwritten:
            check_not_overwritten(entry, self.overwritten)
        values = self.go_live()
        values.take(entry)
        if self._context.state.leaf_depth:
            return
        self.log.append(entry)
        if self.new is not None:
            self.new.append(entry)
        else:
            self.at.following.append(entry)
            self.at = entry

    def keep_result(self, entry: Entry, result: Any) -> None:
        """Keeps in an entry what it gives, and how that and what it has changed looks now."""
        assert self.values is not None
        entry.outputs = list(tensor_paths(result))
        seen = [tensor for _, tensor in entry.outputs] + self.values.sharing(entry.changed)
        entry.specs = {id(tensor): TensorSpec.of(tensor) for tensor in seen}
        if entry.repeats:
            self.specs.update(entry.specs)
        entry.is_fixed = _is_fixed(result)
        entry.result = result
        if not entry.is_fixed:
            objects = {id(obj): carried for carried, obj in self.objects.items()}
            entry.result = template(
                result, lambda tensor: tensor, lambda obj: objects.get(id(obj), obj)
            )

    def template(self, obj: Any, where: str) -> Any:
        """Returns arguments as an entry keeps them."""

        def carry(obj: Any) -> Any:
            if self._context.state.leaf_depth:
                return obj
            for carried, known in self.objects.items():
                if known is obj:
                    return carried
            if isinstance(obj, PendingNumber):
                return obj
            assert self.values is not None
            carried = Carried(len(self.objects), obj, self.values.constant, where)
            self.objects[carried] = obj
            return carried

        def keep(tensor: torch.Tensor) -> Any:
            fake = self.fake(tensor)
            return fake if isinstance(fake, FakeTensor) else self.constants.of(fake)

        return template(obj, keep, carry)


def gradient_lost(entry: Entry, tensors: Sequence[torch.Tensor]) -> str:
    """Returns what is wrong with tensors that a call is given, if their gradients would be lost."""
    assert entry.settings is not None
    if not entry.settings.grad_enabled or not any(
        each.requires_grad and not isinstance(each, FakeTensor) for each in tensors
    ):
        return ""
    return not_of_the_model(str(entry))


def not_of_the_model(place: str) -> str:
    """Returns what is wrong with a place that uses a parameter of nobody's."""
    return (
        f"{place} computes with a tensor that requires a gradient and belongs to no "
        "DistributedModel, so its gradient would stay on one partition. Make it a parameter of the "
        "model, or call detach() on it."
    )


def _is_fixed(obj: Any) -> bool:
    """Whether nobody can change a result."""
    if isinstance(obj, tuple):
        return all(map(_is_fixed, obj))
    return isinstance(obj, torch.Tensor) or is_plain_value(obj)
