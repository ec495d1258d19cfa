"""The recorder: runs the user's code on fakes, answers what is known and writes down what is not.

The user's Python runs in every step, once for each microbatch, on every rank: what it reads, and
what it changes, is what one process would read and change. What is not done again is the tensor
work. Each call of a torch function or of a leaf is compared with the entries that follow in the
trace, and answered with the recorded fakes; where none fits, the trace branches, and from there on
calls are made on fakes and written down.

(A long file: what is seen, compared, answered and written down is one talk about one state.)
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.compat.private import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    inside_transform,
    past_recording,
    quiet_fakes,
    set_grad_enabled,
    version_of,
)
from smdistributed.modelparallel.torch.record import strays
from smdistributed.modelparallel.torch.record.attributes import LeafAttributes
from smdistributed.modelparallel.torch.record.carried import (
    Carried,
    CarriedObjects,
    Contents,
    copied,
    give_state,
    same_in_objects,
    state_of,
)
from smdistributed.modelparallel.torch.record.constants import Constants
from smdistributed.modelparallel.torch.record.costs import Meter, Profile
from smdistributed.modelparallel.torch.record.decisions import Decisions
from smdistributed.modelparallel.torch.record.interception import intercepted
from smdistributed.modelparallel.torch.record.leaves import LeafRuns, Watch, depends_on_others
from smdistributed.modelparallel.torch.record.modules import ModuleCalls, Randomness
from smdistributed.modelparallel.torch.record.nested import (
    fill,
    is_plain_value,
    map_tensors,
    opaque_objects,
    placeholders,
    same,
    template,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.record.passes import OpenPass, Passed
from smdistributed.modelparallel.torch.record.pending import PendingNumber
from smdistributed.modelparallel.torch.record.questions import Question, same_answer
from smdistributed.modelparallel.torch.record.real_run import works_for_real
from smdistributed.modelparallel.torch.record.refusals import refusal
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.spans import (
    Span,
    collapsed,
    hooked_calls,
    inner_tensors,
    leaf_spans,
)
from smdistributed.modelparallel.torch.record.stand_ins import STAND_INS
from smdistributed.modelparallel.torch.record.switches import Settings, positions, settings
from smdistributed.modelparallel.torch.record.taps import call_hooks
from smdistributed.modelparallel.torch.record.trace import (
    Constant,
    Entry,
    EntryKind,
    Looks,
    Seen,
    Trace,
    Way,
)
from smdistributed.modelparallel.torch.record.undo import Change, Growth, Snapshot
from smdistributed.modelparallel.torch.record.values import Values

logger = logging.getLogger(__name__)

#: Questions about a tensor that leave no trace in a computation.
_UNRECORDED = {
    set_grad_enabled,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
}


_SWITCHING_GRADIENTS = {
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}

#: What a call of a torch function may be in a trace.
_KINDS_OF_CALLS = (EntryKind.CALL, EntryKind.QUESTION, EntryKind.NUMBER)


class Recorder(TorchFunctionMode):
    """Sees every torch function and every module call while the user's code runs on fakes.

    Args:
        scene: the models.
        mode: of the fakes.
        device: where the step will run.
        random: the random numbers of the step.
        number_ways: gives each new way a number.
    """

    def __init__(
        self,
        scene: Scene,
        mode: FakeTensorMode,
        device: torch.device,
        random: Randomness,
        number_ways: Callable[[], int],
    ) -> None:
        super().__init__()
        self._scene = scene
        self._mode = mode
        self._device = device
        self._devices = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._random = random
        self._number_ways = number_ways
        self._meter = Meter()
        self._switches = positions()
        self._state = RunState(bool(scene.open))
        self._calls = ModuleCalls(scene, self._state, mode, self._meter)
        self._attributes = LeafAttributes(scene, self._state, self._lines_of)
        self._call_of_modules = nn.Module.__call__

        self._values: Values | None = None
        self._objects: dict[Carried, Any] = {}
        self._contents: dict[Carried, Contents] = {}
        #: By id, fakes that a leaf has made anew, and those that stand for the same in the trace.
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._grown: list[Growth] = []
        self._is_active = False

    # ------------------------------------------------------------------ the run

    @contextlib.contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Puts fakes into the models, for the microbatches of one step."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._scene.in_place())
            stack.enter_context(intercepted(self, list(self._scene.names)))
            stack.enter_context(self._attributes.watched())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet_fakes())
            stack.enter_context(self._mode)
            stack.enter_context(self._meter)
            yield
            self._attributes.check()

    def run(
        self,
        trace: Trace,
        function: Callable[..., Any],
        call: tuple[Sequence[Any], Mapping[str, Any]],
        decisions: Decisions,
    ) -> Passed:
        """Runs one microbatch of the user's function; inside ``on_fakes``.

        Args:
            trace: of microbatches like this one.
            function: the user's.
            call: its arguments; tensors may be fakes where they are not known.
            decisions: answers questions about data.

        Raises:
            UnsupportedError: the function does something that the partitions could not do.
        """
        self._begin(trace, call, decisions)
        with self._active():
            try:
                passed = self._call_step(function, call)
            except Exception as error:
                if isinstance(error, SMPError):
                    raise
                refused = [entry for entry in self._new or () if entry.refusal]
                if refused:
                    raise UnsupportedError(refused[-1].refusal) from error
                if "HigherOrderOperator" in str(error):
                    raise UnsupportedError(
                        "torch's own control flow (torch.cond, while_loop and the like) does not "
                        "run between modules of a pipelined step. Put it into a module that stays "
                        "whole."
                    ) from error
                if PendingNumber.__name__ in str(error):
                    raise _depends_on_values(f"code in {self._calls.where()}") from error
                if FakeTensor.__name__ in str(error):
                    raise UnsupportedError(
                        f"code in {self._calls.where()} fails on the stand-ins of a recording: "
                        f"{error} Put it into a module that stays whole."
                    ) from error
                raise
            finally:
                self._attributes.hide_growth(self._grown)
                self._let_go()
            with self._state.pausing():
                self._settle(passed)
                return passed

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Sees the calls of torch functions."""
        with self:
            self._is_active = True
            try:
                yield
            finally:
                self._is_active = False

    def _let_go(self) -> None:
        """Keeps nothing that holds fakes."""
        self._values = None
        self._objects = {}
        self._contents = {}
        self._aliases = {}
        self._grown = []
        self._log: list[Entry] = []
        #: The entries that the trace does not have, since modules are open.
        self._new: list[Entry] | None = None
        self._spans: list[Span] = []
        self._span: Span | None = None
        self._leaf_runs = LeafRuns(self._scene, self._state, self._calls, self._random)

    def _call_step(
        self, function: Callable[..., Any], call: tuple[Sequence[Any], Mapping[str, Any]]
    ) -> Passed:
        fakes = iter(self._trace.inputs)
        args, kwargs = map_tensors((list(call[0]), dict(call[1])), lambda tensor: next(fakes))
        result = function(*args, **kwargs)
        with self._state.pausing():
            return self._finish(result)

    def _settle(self, passed: Passed) -> None:
        """Sees to it that no fake outlives the microbatch."""
        way = passed.way
        if way is None:
            return
        if way.fakes:
            if not strays.suspects(way):
                return
            gc.collect()  # whatever refers to itself
            found = strays.suspects(way)
        else:
            strays.watch(way, self._trace, self._scene)
            found = list(way.fakes)
        if found:
            strays.settle(found, self._trace, self._scene, functools.partial(self._constant, way))
            del found
            strays.count(self._trace)

    def _constant(self, way: Way, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for one that is the same in every microbatch; else None."""
        values = Values(self._scene, self._state, self._trace.inputs, self._calls.where)
        for entry in way.entries[:-1]:
            values.take(entry)
        return values.constant(tensor)

    def _begin(self, trace: Trace, call: Any, decisions: Decisions) -> None:
        with self._state.pausing(), torch.no_grad():
            trace.put_back()
        self._trace = trace
        self._generators = self._random.state()
        self._decisions = decisions
        self._call_made = call
        self._real_inputs = tensors_in(call)
        self._at = trace.start
        self._constants = Constants()
        self._let_go()
        #: The numbers that were taken from activations.
        self._pending: list[PendingNumber] = []
        self._given: tuple[Question, Any] | None = None
        self._state.begin()
        self._calls.begin()

    def _finish(self, result: Any) -> Passed:
        self._calls.finish()
        numbers = tuple(each.tensor for each in self._pending)
        returned = (tuple(tensors_in(result)), numbers)
        entry = self._match(EntryKind.END, None, returned, {})
        opened = None
        if entry is None:
            args = self._template(returned, "the step function")
            entry = Entry(EntryKind.END, name="the end", args=args)
            if self._state.is_open:
                self._go_live()
                assert self._new is not None
                known = self._log[: len(self._log) - len(self._new)]
                opened = OpenPass(
                    self._at,
                    known,
                    self._new,
                    self._spans,
                    self._trace,
                    self._call_made,
                    self._decisions,
                    entry,
                )
            else:
                self._go_live()
                assert self._values is not None
                entry.way = self._way(self._values, self._log, entry)
                self._at.following.append(entry)
        passed = Passed(
            result, entry.way, self._constants, self._pending, self._calls.profile, opened
        )
        if entry.way is not None:
            passed.leave_fakes()
        return passed

    def _way(self, values: Values, log: Sequence[Entry], end: Entry) -> Way:
        """Returns the way that a log of entries has gone to its end."""
        returned, numbers = values.arguments(end.args)
        graph = values.graph
        graph.result, graph.numbers = list(returned), list(numbers)
        for slot in (slot for model in self._scene.models for slot in model.rebound()):
            if slot[0] not in self._scene.leaves:
                raise UnsupportedError(
                    f"{self._scene.slot_name(slot)} was assigned a new tensor in the forward of a "
                    "module that is split over partitions. Change it in place, or put the "
                    "module on one partition."
                )
        return Way(self._number_ways(), [*log, end], graph)

    def close(self, passed: Passed) -> Way:
        """Returns the way of a microbatch that ran before the partition was decided.

        Calls of modules that now are leaves become single entries, and what the leaves changed in
        Python is put back: they run for real in the step. Inside ``on_fakes``.
        """
        opened = passed.opened
        assert opened is not None
        self._begin(opened.trace, opened.call, opened.decisions)
        self._constants = passed.constants
        with self._active(), self._state.pausing():
            passed.way = self._close(passed, opened)
            passed.leave_fakes()
            passed.opened = None
            self._let_go()
            del opened
            self._settle(passed)
            return passed.way

    def _close(self, passed: Passed, opened: OpenPass) -> Way:
        chosen = leaf_spans(opened.spans, self._scene.leaves)
        done = [span for span in chosen if not span.failed]
        for span in reversed(done):
            span.undo()
        own = {key for span in done for key in span.snapshot.changed}
        for span in done:
            self._attributes.refuse_difference([span.entry], span.snapshot, own)
        for span in opened.spans:
            if span not in chosen and not span.is_inside(set(chosen)):
                self._scene.check_hooks(span.module)
        log = collapsed(opened.log, chosen)
        kept = {id(entry.outputs[0][1]) for entry in log if entry.kind is EntryKind.NUMBER}
        passed.pending[:] = [each for each in passed.pending if id(each.tensor) in kept]
        values = Values(self._scene, self._state, opened.trace.inputs, self._calls.where)
        self._values = values
        spans = {id(span.entry): span for span in chosen}
        at = opened.at
        everything = [*opened.known, *log]
        for entry in log:
            if entry.kind is EntryKind.LEAF:
                self._scene.settle(entry)
        for entry in everything:
            if entry.held and id(entry) in spans:
                self._check_held(values, spans[id(entry)])
            if entry.question is not None:
                self._check_question(values, entry, entry.question.where)
            values.take(entry)
        for entry in log:
            at.following.append(entry)
            at = entry
            if entry.kind is EntryKind.LEAF:
                self._after_leaf(entry)
        returned, _ = opened.end.args
        opened.end.args = returned, tuple(each.tensor for each in passed.pending)
        opened.end.way = way = self._way(values, everything, opened.end)
        at.following.append(opened.end)
        return way

    def _check_question(self, values: Values, entry: Entry, where: str) -> None:
        """Makes sure that a question can be asked again, now that tensors have their partitions."""
        if not Question.of(entry, values, where, len(self._real_inputs)).can_be_answered:
            raise _depends_on_values(where)

    def _check_held(self, values: Values, span: Span) -> None:
        """Makes sure that a leaf does not depend on what another rank left in an object."""
        entry = span.entry
        # The run that made the span has calls of its own.
        call = functools.partial(self._call, span.call, span.module)
        fresh = CarriedObjects(Carried.stand_in)
        for carried, before in span.before:
            give_state(fresh(carried), before)
        arguments = fill((entry.args, entry.kwargs), Carried, fresh)
        with self._calls.uncounted():
            lines = self._leaf_runs.run(
                values, entry.target, lambda: call(*arguments[0], **arguments[1])
            ).lines
        templates = entry.args, entry.kwargs
        if lines != self._leaf_runs.run_on_copies(values, entry.target, call, templates):
            raise depends_on_others(entry.name, templates)

    # ------------------------------------------------------------------ calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._state.paused:
            return func(*args, **kwargs)
        if func in _UNRECORDED:
            if args and type(args[0]) is nn.Parameter:
                args = (self._fake(args[0]), *args[1:])
            return func(*args, **kwargs)
        if not self._state.leaf_depth:
            if isinstance(kwargs.get("generator"), torch.Generator):
                return self._draw(func, args, kwargs)
            entry = self._match(EntryKind.CALL, func, args, kwargs)
            if entry is not None:
                return self._answer(entry, lambda: func(*args, **kwargs))
        self._refuse(func, args)
        if isinstance(func, OpOverload):
            if self._state.is_glue and "lift_fresh" not in str(func):
                raise UnsupportedError(
                    f"{func} was called from {self._calls.where()} past PyTorch's function "
                    "overrides (a scripted or custom function); put that module on one partition."
                )
            return func(*args, **kwargs)
        name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        return self._new_call(func, name, func, args, kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draws from what the user has seeded: the same numbers on every rank, for real."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
            name = torch.overrides.resolve_name(func) or str(func)
            raise UnsupportedError(
                f"{name} in {self._calls.where()} draws from generators that the step has seeded, "
                "for a tensor that is not computed yet. Draw a new tensor (torch.rand(shape)), or "
                "inside a module that stays whole."
            )
        with past_recording():
            return func(*args, **kwargs)

    def _is_seeded(self) -> bool:
        """Whether the step has seeded torch's own generators and means those numbers."""
        return self._random.state() != self._random.expected_state(self._generators)

    def _refuse(self, func: Any, args: Any) -> None:
        if (
            func in _SWITCHING_GRADIENTS
            and not self._state.leaf_depth
            and id(self._fake(args[0])) in self._scene.slots
        ):
            raise UnsupportedError(
                f"requires_grad of a parameter is changed in {self._calls.where()} while a "
                "pipelined step runs. Change it between two calls of step functions."
            )
        if func is torch.Tensor.backward:
            raise UnsupportedError(
                "with more than one partition, tensor.backward() cannot reach the other "
                "partitions: call model.backward(tensor) on the DistributedModel instead."
            )

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what stands for a tensor: of a model's own tensors the fake."""
        if id(tensor) in self._aliases:
            return self._aliases[id(tensor)][1]
        return self._scene.fake_of(tensor) or tensor

    def call_function(
        self, target: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Stands in for a call that torch's function modes do not see."""
        if self._state.paused:
            return call(*args, **kwargs)
        if not self._state.leaf_depth:
            entry = self._match(EntryKind.CALL, target, args, kwargs)
            if entry is not None:
                return self._answer(entry, lambda: call(*args, **kwargs))
        return self._new_call(target, name, call, args, kwargs)

    def checkpointed(self) -> contextlib.AbstractContextManager[None]:
        """Gives what is recorded inside a region of its own; the outermost one counts."""
        return self._state.checkpointed()

    def backward(self, model: Any, tensors: Any, grad_tensors: Any) -> None:
        """Notes that the user asked for the gradients of ``tensors``."""
        if isinstance(tensors, torch.Tensor):
            tensors, grad_tensors = [tensors], None if grad_tensors is None else [grad_tensors]
        starts = [None] * len(tensors) if grad_tensors is None else grad_tensors
        for tensor, start in zip(tensors, starts, strict=True):
            if start is not None:
                # The same gradient, from a scalar; recorded like the user's own code.
                tensor = (tensor * start.detach().conj()).sum().real
            if tensor.numel() != 1:
                raise RuntimeError(
                    "grad can be implicitly created only for scalar outputs; model.backward "
                    f"received a tensor of shape {tuple(tensor.shape)}."
                )
            with self._state.pausing():
                entry = self._match(EntryKind.BACKWARD, model, (tensor,), {})
                if entry is None:
                    args = self._template((tensor,), "model.backward")
                    self._add(Entry(EntryKind.BACKWARD, model, "model.backward", args))
                else:
                    self._answer(entry, lambda: None)

    # ------------------------------------------------------------------ known calls

    def _settings(self) -> Settings:
        return settings(self._devices, self._switches)

    def _match(self, kind: EntryKind, target: Any, args: Any, kwargs: Any) -> Entry | None:
        """Returns the following entry that is this call; None if none is."""
        following = self._at.following
        if not following or self._new is not None:
            return None
        now: Settings | None = None
        for entry in following:
            if (entry.target is not target and entry.target != target) or (
                entry.kind is not kind
                and (kind is not EntryKind.CALL or entry.kind not in _KINDS_OF_CALLS)
            ):
                continue
            num_constants, num_objects = len(self._constants), len(self._objects)
            if same(entry.args, args, self._special) and same(entry.kwargs, kwargs, self._special):
                if entry.settings is not None:
                    now = now or self._settings()
                if (entry.settings == now or entry.settings is None) and self._is_same_place(entry):
                    if entry.question is None:
                        return entry
                    return self._answered(entry.question, following)
            self._constants.forget_after(num_constants)
            for carried in list(self._objects)[num_objects:]:
                del self._objects[carried]
                self._contents.pop(carried, None)
        return None

    def _is_same_place(self, entry: Entry) -> bool:
        """Whether what an entry depends on besides its arguments is as it was."""
        if entry.region != self._state.region:
            return False
        if entry.draw is not None and (
            entry.draw != self._calls.current.coming_draw or self._is_seeded()
        ):
            return False
        if entry.kind is not EntryKind.LEAF:
            return True
        return entry.flags == self._scene.flags_of(entry.target) and all(
            self._is_in_state(carried, before) for carried, before in entry.held
        )

    def _is_in_state(self, carried: Carried, before: Any) -> bool:
        """Whether an object with state is as it was when it was handed to a leaf."""
        obj = self._objects[carried]
        contents = self._contents.get(carried)
        if contents is not None and contents.is_current():
            return True  # what leaves have made of it, nobody has changed
        self._contents[carried] = Contents(obj)
        return same(before, state_of(obj), same_in_objects)

    def _special(self, want: Any, got: Any) -> bool:
        """Compares what is neither identical nor a plain value."""
        if isinstance(want, Constant):
            return (
                isinstance(got, torch.Tensor)
                and not isinstance(got, FakeTensor)
                and self._scene.fake_of(got) is None
                and self._constants.stands_for(want, got)
            )
        if isinstance(want, torch.Tensor):
            return isinstance(got, torch.Tensor) and self._fake(got) is want
        if isinstance(want, Carried):
            if want in self._objects:
                return self._objects[want] is got
            if type(got) is not type(want.pristine) or not same(
                want.state, state_of(got), same_in_objects
            ):
                return False
            self._objects[want] = got
            self._contents[want] = Contents(got)
            return True
        return False

    def _answered(self, question: Question, following: Sequence[Entry]) -> Entry | None:
        """Asks a question that is known; returns the entry for its answer, if there is one."""
        answer = self._ask(question)
        for entry in following:
            if entry.question is question and same_answer(entry.answer, answer):
                return entry
        self._given = question, answer
        return None

    def _answer(self, entry: Entry, call: Callable[[], Any]) -> Any:
        """Returns what a known call gives."""
        self._at = entry
        self._log.append(entry)
        if self._values is not None:
            with self._state.pausing():
                self._values.take(entry)
        if entry.draw is not None:
            self._calls.current.draws += 1
        if entry.is_repeated:
            with self._state.pausing():
                call()
        if entry.kind is EntryKind.LEAF:
            if entry.seen is Seen.ALL:
                call()
            else:
                self._calls.count(entry.target)
            if entry.seen is Seen.HOOKS:
                with self._state.pausing():
                    for each in entry.hooked:
                        given = fill(each[1:], (Carried, Constant), self._given_for)
                        call_hooks(each.module, *given)
            self._after_leaf(entry)
            if entry.effects:
                with self._state.pausing():
                    for carried, effects in entry.effects:
                        self._contents[carried].apply(effects)
        elif entry.kind is EntryKind.NUMBER:
            return self._number(entry)
        return entry.result if entry.is_fixed else fill(entry.result, Carried, self._objects.get)

    def _after_leaf(self, entry: Entry) -> None:
        self._attributes.note_call(entry)
        for module, name, tensor in entry.hidden:
            self._attributes.hide(module, name, tensor)

    def _number(self, entry: Entry) -> PendingNumber:
        number = PendingNumber(tensor=entry.outputs[0][1], where=f"{entry.name} in {entry.where}")
        self._pending.append(number)
        return number

    # ------------------------------------------------------------------ new calls

    def _go_live(self) -> None:
        """Leaves the trace: from here on calls are made on fakes and written down."""
        if self._values is not None:
            return
        values = Values(self._scene, self._state, self._trace.inputs, self._calls.where)
        for entry in self._log:
            if entry.held and self._scene.leaves:
                call = functools.partial(self._call, nn.Module.__call__, entry.target)
                arguments = (entry.args, entry.kwargs)
                self._leaf_runs.run_on_copies(values, entry.target, call, arguments)
            values.take(entry)
        self._values = values
        if self._state.is_open:
            self._new = []

    def _add(self, entry: Entry) -> None:
        """Writes an entry down."""
        self._go_live()
        assert self._values is not None
        if self._state.leaf_depth:
            self._values.take(entry)
            return
        self._log.append(entry)
        self._values.take(entry)
        if self._new is not None:
            self._new.append(entry)
        else:
            self._at.following.append(entry)
            self._at = entry

    def _new_call(
        self, target: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Makes a call that is not known, on fakes, and writes it down."""
        if not self._state.leaf_depth and inside_transform():
            raise UnsupportedError(
                f"{name} was called in {self._calls.where()} inside a transform of torch.func "
                "(vmap, grad, vjp, jvp): it shows the calls of the transformed function, not what "
                "it makes of them. Put it into a module that stays whole."
            )
        with self._state.pausing():
            tensors = tensors_in((args, kwargs))
            if any(not isinstance(tensor, FakeTensor) for tensor in tensors):
                args, kwargs = map_tensors((tuple(args), dict(kwargs)), self._fake)
                tensors = tensors_in((args, kwargs))
                if not self._state.leaf_depth and not any(
                    isinstance(tensor, FakeTensor) for tensor in tensors
                ):
                    return self._real_call(name, lambda: call(*args, **kwargs), tensors)
            elif not tensors and not self._state.leaf_depth and _holds_arrays((args, kwargs)):
                with past_recording():
                    return call(*args, **kwargs)
            self._go_live()
            return self._made_call(target, name, lambda: call(*args, **kwargs), args, kwargs)

    def _real_call(
        self, name: str, call: Callable[[], Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Makes a call on tensors that no step computes: it is Python, like a number's."""
        versions = [version_of(tensor) for tensor in tensors]
        with past_recording():
            before = [tensor.clone() for tensor in tensors] if self._span is not None else []
            result = call()
            if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(result)):
                raise UnsupportedError(_not_of_the_model(f"{name} in {self._calls.where()}"))
        for position, tensor in enumerate(tensors):
            if version_of(tensor) != versions[position]:
                span = self._span
                while span is not None:
                    span.written.append((tensor, before[position]))
                    span = span.parent
        return result

    def _made_call(
        self, target: Any, name: str, call: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        assert self._values is not None
        where = self._calls.where()
        if self._state.is_open and not self._state.leaf_depth:
            self._check_known((args, kwargs), self._calls.current.module)
        entry = Entry(EntryKind.CALL, target, name, where=where)
        entry.args = self._template(tuple(args), f"{name} in {where}")
        entry.kwargs = self._template(dict(kwargs), f"{name} in {where}")
        entry.settings = self._settings()
        entry.region = self._state.region
        tensors = tensors_in((args, kwargs))
        looks = [Looks.of(tensor) for tensor in tensors]
        versions = [version_of(tensor) for tensor in tensors]
        flops, draws, writes = self._meter.flops, self._meter.random_draws, self._meter.writes
        try:
            with contextlib.nullcontext() if self._state.leaf_depth else self._random.kept():
                result = STAND_INS[target](*args, **kwargs) if target in STAND_INS else call()
        except DATA_DEPENDENT as error:
            return self._decide(entry, error)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if not self._state.leaf_depth and works_for_real(target, args, kwargs):
                raise UnsupportedError(
                    f"{entry} cannot be recorded: {error} Put it into a module that stays whole, "
                    "or outside the step function."
                ) from error
            raise
        if self._meter.random_draws > draws:
            if not self._state.leaf_depth and self._is_seeded():
                return self._draw(target, args, kwargs)
            entry.draw = self._calls.current.next_draw(target)
        entry.flops = self._meter.flops - flops
        entry.refusal = refusal(target, kwargs, where) or _gradient_lost(entry, tensors)
        entry.changed = [
            tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if version_of(tensor) != version
        ]
        if self._meter.writes > writes or any(
            not isinstance(tensor, FakeTensor) for tensor in entry.changed
        ):
            entry.changed = []
            entry.refusal = (
                f"{entry} changes a tensor in place that belongs to no DistributedModel and to no "
                "argument. The step computes the change elsewhere: make the tensor a buffer of a "
                "module that is not split, or return what changes it and do that outside."
            )
        for tensor, before in zip(tensors, looks, strict=True):
            if isinstance(tensor, FakeTensor) and Looks.of(tensor) != before:
                entry.is_repeated = True
                self._trace.metadata.setdefault(id(tensor), (tensor, before))
        self._give(entry, result)
        self._add(entry)
        return result

    def _give(self, entry: Entry, result: Any) -> None:
        """Keeps what an entry gives."""
        entry.outputs = list(tensor_paths(result))
        entry.is_fixed = _is_fixed(result)
        entry.result = result
        if not entry.is_fixed:
            objects = {id(obj): carried for carried, obj in self._objects.items()}
            entry.result = template(
                result, lambda tensor: tensor, lambda obj: objects.get(id(obj), obj)
            )

    def _template(self, obj: Any, where: str) -> Any:
        """Returns arguments as an entry keeps them."""

        def carry(obj: Any) -> Any:
            if self._state.leaf_depth:
                return obj
            for carried, known in self._objects.items():
                if known is obj:
                    return carried
            if isinstance(obj, PendingNumber):
                return obj
            values = self._values
            assert values is not None
            carried = Carried(len(self._objects), obj, values.constant, where)
            self._objects[carried] = obj
            return carried

        def keep(tensor: torch.Tensor) -> Any:
            fake = self._fake(tensor)
            return fake if isinstance(fake, FakeTensor) else self._constants.of(fake)

        return template(obj, keep, carry)

    # ------------------------------------------------------------------ questions

    def _ask(self, question: Question) -> Any:
        given = dict(enumerate(self._real_inputs))
        for position, constant in question.constants.items():
            given[position] = self._constants.known(constant, question.where)
        return self._decisions.answer(
            lambda: question.answer(given, self._random.drawing, self._scene.real_of),
            question.where,
        )

    def _decide(self, entry: Entry, error: Exception) -> Any:
        """Answers a question about data, if that can be done before the step runs."""
        values = self._values
        assert values is not None
        where = f"{entry.name} in {entry.where}"
        given, self._given = self._given, None
        question = Question.of(entry, values, where, len(self._real_inputs))
        if not question.can_be_answered:
            if question.function is torch.Tensor.item and not self._state.leaf_depth:
                return self._add_number(entry)
            raise _depends_on_values(where) from error
        if given is None:
            answer = self._ask(question)
        else:
            question, answer = given
        entry.kind = EntryKind.QUESTION
        entry.question, entry.answer = question, answer
        result = question.result(answer, self._mode, self._device)
        self._give(entry, result)
        self._add(entry)
        return result

    def _add_number(self, entry: Entry) -> PendingNumber:
        """Returns what stands for the number in a tensor that is not computed yet."""
        entry.kind = EntryKind.NUMBER
        (tensor,) = entry.args
        kept = tensor.detach()
        entry.outputs = [((), kept)]
        self._add(entry)
        return self._number(entry)

    # ------------------------------------------------------------------ modules

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for ``module(*args, **kwargs)`` during the run."""
        if module not in self._scene.names or self._state.paused:
            return call(module, *args, **kwargs)
        if self._state.leaf_depth:
            return self._call(call, module, *args, **kwargs)
        if module in self._scene.leaves:
            self._scene.check_holding(module)
            entry = self._match(EntryKind.LEAF, module, args, kwargs)
            if entry is not None:
                return self._answer(entry, lambda: self._run_again(call, entry))
            return self._new_leaf(call, module, args, kwargs)
        if module in self._scene.open:
            return self._open_call(call, module, args, kwargs)
        self._scene.check_hooks(module)
        if self._values is None:
            return self._calls.follow(call, module, args, kwargs)
        return self._calls.call(call, module, *args, **kwargs)

    def _call(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        result = self._calls.call(call, module, *args, **kwargs)
        self._leaf_runs.note_call(module, args, kwargs, result)
        return result

    def _leaf_entry(self, module: nn.Module, args: Any, kwargs: Any) -> Entry:
        """Returns the entry of a leaf's call, before the call."""
        name, where = self._scene.names[module] or "the model", self._calls.where()
        entry = Entry(EntryKind.LEAF, module, name, where=where)
        entry.args = self._template(tuple(args), f"{name} in {where}")
        entry.kwargs = self._template(dict(kwargs), f"{name} in {where}")
        entry.settings = self._settings()
        entry.region = self._state.region
        entry.modules = self._scene.inner_of(module)
        entry.flags = self._scene.flags_of(module)
        entry.refusal = _gradient_lost(entry, tensors_in((args, kwargs)))
        entry.held = [
            (each, state_of(self._objects[each]))
            for each in dict.fromkeys(placeholders((entry.args, entry.kwargs), Carried))
        ]
        return entry

    def _new_leaf(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        with self._state.pausing():
            self._go_live()
            values = self._values
            assert values is not None
            args, kwargs = map_tensors((tuple(args), dict(kwargs)), self._fake)
            entry = self._leaf_entry(module, args, kwargs)
            watch = Watch(self._meter, module, (args, kwargs))
            measured = functools.partial(self._call, call, module)
            templates = entry.args, entry.kwargs
            handed = self._handed(entry)
            with self._attributes.shown_to(module):
                alike = None
                if entry.held:
                    alike = self._leaf_runs.run_on_copies(values, module, measured, templates)
                run = self._leaf_runs.run(values, module, lambda: measured(*args, **kwargs))
                self._grown += run.grown
                watch.tell(entry)
                entry.inner, entry.hooked = run.inner, run.hooked
                self._complete(entry, run.result, run.changes, handed)
            if alike is not None and alike != run.lines:
                raise depends_on_others(entry.name, templates)
            self._scene.settle(entry)
            self._add(entry)
            self._after_leaf(entry)
        return run.result

    def _run_again(self, call: Callable[..., Any], entry: Entry) -> None:
        """Runs a known leaf on fakes, for what code outside can see of it besides its result."""
        with self._state.pausing(), self._attributes.shown_to(entry.target):
            self._go_live()
            assert self._values is not None
            args, kwargs = fill((entry.args, entry.kwargs), (Carried, Constant), self._given_for)
            again = functools.partial(self._call, call, entry.target, *args, **kwargs)
            run = self._leaf_runs.run(self._values, entry.target, again)
        self._grown += run.grown
        known: dict[Any, torch.Tensor] = dict(entry.inner.values())
        made: dict[Any, torch.Tensor] = dict(run.inner.values())
        known.update(entry.outputs)
        made.update(tensor_paths(run.result))
        for place in known.keys() & made.keys():
            self._aliases[id(made[place])] = made[place], known[place]

    def _lines_of(self, entry: Entry) -> list[str] | None:
        """Returns what the call of a leaf does now, as text; None where fakes do not show it."""

        def stand_in(placeholder: Carried | Constant) -> Any:
            if isinstance(placeholder, Constant):
                return placeholder.tensor
            return placeholder.stand_in()

        leaf = entry.target
        values = Values(self._scene, self._state, [], self._calls.where)
        args, kwargs = fill((entry.args, entry.kwargs), (Carried, Constant), stand_in)
        again = functools.partial(self._call, self._call_of_modules, leaf, *args, **kwargs)
        with self._aside(values), self._calls.uncounted(), self._attributes.shown_to(leaf):
            run = self._leaf_runs.run(values, leaf, again)
            is_clear = not any(each.opaque for each in self._calls.profile.modules.values())
        for growth in run.grown:
            growth.remove()
        return run.lines if is_clear else None

    @contextlib.contextmanager
    def _aside(self, values: Values) -> Iterator[None]:
        """Runs something that belongs to no microbatch."""
        kept = self._values, self._leaf_runs, self._calls.profile
        self._values, self._calls.profile = values, Profile()
        self._leaf_runs = LeafRuns(self._scene, self._state, self._calls, self._random)
        try:
            with contextlib.nullcontext() if self._is_active else self:
                yield
        finally:
            self._values, self._leaf_runs, self._calls.profile = kept

    def _given_for(self, placeholder: Carried | Constant) -> Any:
        """Returns what stands in this microbatch in the place of a placeholder."""
        if isinstance(placeholder, Constant):
            return self._constants.given(placeholder)
        return copied(self._objects[placeholder])

    def _open_call(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Calls a module that may turn out to be a leaf."""
        with self._state.pausing():
            self._go_live()
            assert self._new is not None
            args, kwargs = map_tensors((tuple(args), dict(kwargs)), self._fake)
            self._check_known((args, kwargs), self._calls.current.module)
            entry = self._leaf_entry(module, args, kwargs)
            before = [(each, copied(self._objects[each])) for each, _ in entry.held]
            handed = self._handed(entry)
            watch = Watch(self._meter, module, (args, kwargs))
            snapshot = Snapshot(module.modules())
            outer = self._span
            span = Span(module, outer, len(self._new), entry, snapshot, call, before)
            self._span = span
            self._spans.append(span)
        first = len(self._spans)
        try:
            result = self._calls.call(call, module, *args, **kwargs)
        except BaseException:
            span.failed = True
            raise
        finally:
            self._span = outer
            span.end = len(self._new)
        with self._state.pausing():
            self._check_known(result, module)
            watch.tell(entry)
            changes = snapshot.note_changes()
            span.outputs = list(tensor_paths(result))
            entry.inner = inner_tensors(span, self._spans[first:], self._scene.names)
            self._complete(entry, result, changes, handed)
            entry.hooked = hooked_calls([span, *self._spans[first:]])
        return result

    def _check_known(self, obj: Any, module: nn.Module | None) -> None:
        """Has a module kept whole that has a tensor that no recorded call made."""
        assert self._values is not None
        if module is not None and any(map(self._values.is_stranger, tensors_in(obj))):
            self._calls.keep_whole(module, "it makes a tensor by a call that cannot be recorded")

    def _handed(self, entry: Entry) -> dict[Carried, Contents]:
        """Returns what is in the objects that a leaf is given, before its call."""
        return {carried: Contents(self._objects[carried]) for carried, _ in entry.held}

    def _complete(
        self,
        entry: Entry,
        result: Any,
        changes: Sequence[Change],
        handed: Mapping[Carried, Contents],
    ) -> None:
        """Completes the entry of a leaf's call, after the call."""
        self._give(entry, result)
        entry.effects = [
            (carried, contents.effects())
            for carried, contents in handed.items()
            if not contents.is_current()
        ]
        entry.changes = list(changes)


def _depends_on_values(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where} makes Python depend on the value of an activation, or of a tensor that one "
        "partition holds (a branch, float() or a data-dependent shape). A pipelined step is "
        "recorded before values exist: keep the decision inside one module, return the tensor (or "
        "its .item()) from the step function and look at it outside, or put that module on one "
        "partition."
    )


def _is_fixed(obj: Any) -> bool:
    """Whether nobody can change a result."""
    if isinstance(obj, tuple):
        return all(map(_is_fixed, obj))
    return isinstance(obj, torch.Tensor) or is_plain_value(obj)


def _holds_arrays(obj: Any) -> bool:
    return any(type(each).__module__ == "numpy" for each in opaque_objects(obj))


def _gradient_lost(entry: Entry, tensors: Sequence[torch.Tensor]) -> str:
    """Returns what is wrong with tensors that a call is given, if their gradients would be lost."""
    assert entry.settings is not None
    if not entry.settings.grad_enabled or not any(
        each.requires_grad and not isinstance(each, FakeTensor) for each in tensors
    ):
        return ""
    return _not_of_the_model(str(entry))


def _not_of_the_model(place: str) -> str:
    return (
        f"{place} computes with a tensor that requires a gradient and belongs to no "
        "DistributedModel, so its gradient would stay on one partition. Make it a parameter of the "
        "model, or call detach() on it."
    )
