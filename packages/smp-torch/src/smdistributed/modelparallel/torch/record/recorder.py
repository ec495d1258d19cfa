"""The recorder: runs the user's code on fakes, answers what is known and writes down what is not.

The user's Python runs in every step, once for each microbatch, on every rank: what it reads, and
what it changes, is what one process would read and change. What is not done again is the tensor
work. Each call of a torch function or of a leaf is compared with the entries that follow in the
trace, and answered with the recorded fakes; where none fits, the trace branches, and from there on
calls are made on fakes and written down.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.compat.private.distributed import exchanges
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    OpOverload,
    is_of_control_flow,
    is_of_fakes,
    quiet_fakes,
)
from smdistributed.modelparallel.torch.record.buffers_before import Earlier, buffer_before
from smdistributed.modelparallel.torch.record.calls.activation_gradients import (
    OF_GRADIENTS,
    ActivationGradients,
)
from smdistributed.modelparallel.torch.record.calls.forward_hooks import ForwardHook
from smdistributed.modelparallel.torch.record.calls.interception import intercepted
from smdistributed.modelparallel.torch.record.calls.known import KnownCalls
from smdistributed.modelparallel.torch.record.calls.new import NewCalls
from smdistributed.modelparallel.torch.record.calls.of_leaves import LeafCalls
from smdistributed.modelparallel.torch.record.calls.outside import OutsideHooks
from smdistributed.modelparallel.torch.record.calls.refusals import (
    NowhereError,
    exchanges_stand_ins,
    hooks_stand_ins,
    switched_how,
)
from smdistributed.modelparallel.torch.record.calls.regions import Again, BuffersWatched
from smdistributed.modelparallel.torch.record.calls.remembering import keep_remembering_whole
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.data import SETTING_DATA, can_be_put, put_data
from smdistributed.modelparallel.torch.record.leaves.attributes import Deed, LeafAttributes
from smdistributed.modelparallel.torch.record.leaves.modules import ModuleCalls, Randomness
from smdistributed.modelparallel.torch.record.leaves.spans import collapsed, leaf_spans
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch, ShareOf
from smdistributed.modelparallel.torch.record.passes import OpenPass, Passed
from smdistributed.modelparallel.torch.record.questions.ahead import (
    Ahead,
    computed_before,
    depends_on_values,
    question_ahead,
)
from smdistributed.modelparallel.torch.record.questions.decisions import Decisions
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.record.questions.question import Before, Question
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace import strays
from smdistributed.modelparallel.torch.record.trace.buffers import (
    changed_in,
    keep_changed,
    own_buffers,
    take_assigned,
)
from smdistributed.modelparallel.torch.record.trace.overwritten import (
    check_not_overwritten,
    overwritten,
)
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind, Trace, Way
from smdistributed.modelparallel.torch.record.trace.values import Values
from smdistributed.modelparallel.torch.state.contents import tensors_held
from smdistributed.modelparallel.torch.state.switches import positions
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    refuse_reads,
    slices_guarded,
)
from smdistributed.modelparallel.torch.tensors.foreach import is_foreach, one_by_one
from smdistributed.modelparallel.torch.tensors.functions import (
    GIVING_BACKWARD_CODE,
    HOOKING_GRADIENTS,
    READING_GRADIENTS,
    REQUIRING_GRADIENT,
    SWITCHING_GRADIENTS,
    UNRECORDED,
)
from smdistributed.modelparallel.torch.tensors.nested import fill, map_tensors, tensors_in
from smdistributed.modelparallel.torch.trial.turns import is_code_of_others

_OWN_PACKAGE = __name__.removesuffix("record.recorder")


class Recorder(TorchFunctionMode):
    """Sees every torch function and every module call while the user's code runs on fakes.

    Args:
        scene: the models.
        mode: of the fakes.
        device: where the step will run.
        random: the random numbers of the step.
        meter: counts what the run does.
        number_ways: gives each new way a number.
        companions: global ranks of those that have the same modules.
        together: global ranks of those that have slices of the same modules, this one included.
    """

    def __init__(
        self,
        scene: Scene,
        mode: FakeTensorMode,
        device: torch.device,
        random: Randomness,
        meter: Meter,
        number_ways: Callable[[], int],
        companions: Collection[int] = (),
        together: Collection[int] = (),
    ) -> None:
        super().__init__()
        state = RunState(bool(scene.open))
        self._scene = scene
        self._buffers = own_buffers(scene)
        self._state = state
        self._calls = ModuleCalls(scene, state, mode, meter)
        self._context = Context(scene, mode, device, random, meter, positions(), state, self._calls)
        self._attributes = LeafAttributes(scene, state, self._deed_of)
        self._number_ways = number_ways
        self._companions = frozenset(companions)
        self._together = frozenset(together)
        self._call_of_modules = nn.Module.__call__
        self._is_active = False

    # ------------------------------------------------------------------ the run

    @contextlib.contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Puts fakes into the models, for the microbatches of one step."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._scene.in_place())
            stack.enter_context(intercepted(self, list(self._scene.names)))
            for model in self._scene.models:
                stack.enter_context(model.forward_hooks.intercepted(self._call_hook))
            stack.enter_context(self._attributes.watched())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet_fakes())
            stack.enter_context(self._context.mode)
            self._calls.follow_hooks()
            stack.enter_context(self._context.meter)
            yield
            self._attributes.check()

    def run(
        self,
        trace: Trace,
        function: Callable[..., Any],
        call: tuple[Sequence[Any], Mapping[str, Any]],
        decisions: Decisions,
        earlier: Sequence[Earlier] = (),
        share_of: ShareOf = lambda module: 1.0,
    ) -> Passed:
        """Runs one microbatch of the user's function; inside ``on_fakes``.

        Args:
            trace: of microbatches like this one.
            function: the user's.
            call: its arguments; tensors may be fakes where they are not known.
            decisions: answers questions about data.
            earlier: the microbatches of the step that have run.
            share_of: by what a loss of a model counts in the mini-batch's.

        Raises:
            UnsupportedError: the function does something that the partitions could not do.
        """
        self._begin(trace, call, decisions, earlier, share_of)
        with self._active():
            try:
                passed = self._call_step(function, call)
            except Exception as error:
                if isinstance(error, SMPError):
                    raise
                refused = [entry for entry in self._now.new or () if entry.refusal]
                if refused:
                    raise UnsupportedError(refused[-1].refusal) from error
                if is_of_control_flow(error):
                    raise UnsupportedError(
                        "torch's own control flow (torch.cond, while_loop and the like) does not "
                        "run between modules of a pipelined step. Put it into a module that stays "
                        "whole."
                    ) from error
                if PendingNumber.__name__ in str(error):
                    raise depends_on_values(f"code in {self._calls.where()}") from error
                if is_of_fakes(error):
                    raise UnsupportedError(
                        f"code in {self._calls.where()} fails on the stand-ins of a recording: "
                        f"{error} Put it into a module that stays whole."
                    ) from error
                raise
            finally:
                for entry in self._now.log:
                    entry.note_taken()
                self._attributes.hide_growth(self._now.grown)
                self._forget_cached()
                self._now.let_go()
                self._gradients.let_go()
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

    def _call_step(
        self, function: Callable[..., Any], call: tuple[Sequence[Any], Mapping[str, Any]]
    ) -> Passed:
        fakes = iter(self._now.trace.inputs)
        args, kwargs = map_tensors((list(call[0]), dict(call[1])), lambda tensor: next(fakes))
        with slices_guarded(model.slice_guard for model in self._scene.models):
            result = function(*args, **kwargs)
        with self._state.pausing():
            return self._finish(result)

    def _forget_cached(self) -> None:
        """Takes the fakes of a microbatch out of caches of functions."""
        if self._now.values is not None:
            self._scene.caches.look_for_new()
        self._scene.caches.clear()

    def _settle(self, passed: Passed) -> None:
        """Sees to it that no fake outlives the microbatch."""
        way, trace = passed.way, self._now.trace
        if way is None:
            return
        passed.stored = [each for each in way.stored if each.close()]
        is_new = not way.fakes
        constant = functools.partial(self._constant, way)
        if is_new:
            strays.watch(way, trace, self._scene)
            found = list(way.fakes)
        else:
            if not strays.suspects(way):
                return
            stored = strays.settle_in(way, self._scene, constant)
            passed.stored += [each for each in stored if each.close()]
            if not strays.suspects(way):
                return
            gc.collect()  # whatever refers to itself
            found = strays.suspects(way)
        if found:
            # What ranks are given is decided with the plan.
            values = way.values if way.plan is None else strays.returned(way)
            stored = strays.settle(found, trace, self._scene, constant, values)
            passed.stored += [each for each in stored if each.close()]
            if way.plan is None:
                stored_here = (value for each in passed.stored for value in each.values)
                way.graph.kept = list(dict.fromkeys((*way.graph.kept, *stored_here)))
            if is_new:
                way.stored = list(passed.stored)
            del found
            strays.count(trace)

    def computed_before(self, log: Sequence[Entry], trace: Trace, where: str) -> Before:
        """Returns what the first calls of a microbatch that has run compute.

        Args:
            log: the calls.
            trace: that has them.
            where: who needs it, for messages.

        Raises:
            UnsupportedError: they cannot be computed twice.
        """
        values = Values(self._scene, self._state, trace, self._calls.where)
        return computed_before(log, values, where)

    def _constant(self, way: Way, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for one that is the same in every microbatch; else None."""
        values = self._now.new_values(way.graph.buffers)
        for entry in way.entries[:-1]:
            values.take(entry)
        return values.constant(tensor)

    def _begin(
        self,
        trace: Trace,
        call: tuple[Sequence[Any], Mapping[str, Any]],
        decisions: Decisions,
        earlier: Sequence[Earlier] = (),
        share_of: ShareOf = lambda module: 1.0,
    ) -> None:
        with self._state.pausing(), torch.no_grad():
            trace.put_back()
        buffer = functools.partial(buffer_before, earlier, self._scene.real_of)
        self._now = now = Microbatch(self._context, trace, call, decisions, buffer, share_of)
        self._known = KnownCalls(self._context, now)
        self._new = NewCalls(self._context, now)
        self._gradients = ActivationGradients(self._context, now, self._known, self._attributes)
        now.ahead = Ahead(self._context, now, self._known, self._new.make, self._attributes)
        self._outside = OutsideHooks(self._context, now, self._attributes, self._gradients)
        parts = self._known, self._attributes, self._gradients, self._outside
        self._leaves = LeafCalls(self._context, now, *parts, self._new.copy)
        self._state.begin()
        self._calls.begin()
        self._is_first = not trace.start.following

    def _deed_of(self, entry: Entry) -> Deed | None:
        """See ``CallsAside.deed_of``; also between microbatches."""
        with contextlib.nullcontext() if self._is_active else self:
            return self._leaves.aside.deed_of(self._call_of_modules, entry)

    def _finish(self, result: Any) -> Passed:
        now = self._now
        self._check_put_back()
        for slot in self._scene.frozen.values():
            raise switched_how(*slot, "and left so when the step function ends")
        self._calls.finish()
        if now.new is not None:
            keep_remembering_whole(self._context, now, self._deed_of)
        arrays, now.arrays = now.arrays, []  # they hold calls, and so fakes
        for array in arrays:
            array.check()
        numbers = tuple(each.tensor for each in now.pending)
        assigned = take_assigned(self._buffers)
        returned = (tuple(tensors_in(result)), numbers, assigned)
        entry = self._known.match(EntryKind.END, None, returned, {})
        opened = None
        if entry is None:
            args = now.template(returned, "the step function")
            entry = Entry(EntryKind.END, name="the end", args=args)
            values = now.go_live()
            if now.new is not None:
                known = now.log[: len(now.log) - len(now.new)]
                opened = OpenPass(
                    now.at,
                    known,
                    now.new,
                    now.spans,
                    now.trace,
                    now.call,
                    now.decisions,
                    entry,
                    values.models,
                )
            else:
                entry.way = self._way(values, now.log, entry)
                if self._is_first:  # else the tape of another microbatch has its beginning
                    entry.way.graph.tape = self._calls.profile.tape
                now.at.following.append(entry)
        passed = Passed(result, entry.way, now.constants, now.pending, self._calls.profile, opened)
        if entry.way is not None:
            passed.leave_fakes()
        return passed

    def _check_put_back(self) -> None:
        """Makes sure that modules have their own tensors again that were called with others.

        Raises:
            UnsupportedError: one has not, and other microbatches would find them.
        """
        for module in reversed(self._now.functional):  # inner ones are called last
            if not self._scene.has_its_own(module):
                raise UnsupportedError(
                    f"{self._scene.names[module] or 'the model'} is left with other parameters or "
                    "buffers than its own by code outside it, while a pipelined step runs. Put "
                    "them into it for the time of a call (torch.func.functional_call), change its "
                    "own in place, or between two calls of step functions."
                )

    def _way(self, values: Values, log: Sequence[Entry], end: Entry) -> Way:
        """Returns the way that a log of entries has gone to its end."""
        values = self._with_buffers_kept(values, log, end)
        returned, numbers, _ = values.arguments(end.args)
        values.settle_gradients((returned, numbers))
        graph = values.graph
        graph.result, graph.numbers = list(returned), list(numbers)
        graph.written = values.written_inputs()
        for slot in (slot for model in self._scene.models for slot in model.rebound()):
            if slot[0] not in self._scene.leaves:
                raise UnsupportedError(
                    f"{self._scene.slot_name(slot)} was assigned a new tensor in the forward of a "
                    "module that is split over partitions. Change it in place, or put the "
                    "module on one partition."
                )
        return Way(self._number_ways(), [*log, end], graph, values=values.known())

    def _with_buffers_kept(self, values: Values, log: Sequence[Entry], end: Entry) -> Values:
        """Returns the values of a graph that keeps what a microbatch makes of buffers."""
        changed = changed_in(values.graph, self._buffers, end.args[2])
        if not changed:
            return values
        slots = {self._buffers[key][:2] for key in changed}
        kept = self._now.new_values(slots)
        for entry in log:
            kept.take(entry)
        keep_changed(kept, values, self._buffers, changed)
        return kept

    def close(self, passed: Passed) -> Way:
        """Returns the way of a microbatch that ran before the partition was decided.

        Calls of modules that now are leaves become single entries, and what the leaves changed in
        Python is put back: they run for real in the step. Inside ``on_fakes``.
        """
        opened = passed.opened
        assert opened is not None
        self._begin(opened.trace, opened.call, opened.decisions)
        self._now.constants = passed.constants
        with self._active(), self._state.pausing():
            passed.way = self._close(passed, opened)
            self._forget_cached()
            passed.leave_fakes()
            passed.opened = None
            self._now.let_go()
            del opened
            self._settle(passed)
            return passed.way

    def _close(self, passed: Passed, opened: OpenPass) -> Way:
        chosen = leaf_spans(opened.spans, self._scene.leaves)
        done = [span for span in chosen if not span.failed]
        for span in reversed(done):
            span.undo()
        for span in done:
            if span.left_behind is not None:
                raise span.left_behind
        own = {key for span in done for key in span.snapshot.changed}
        for span in done:
            inside = opened.log[span.start : span.end]
            for position, entry in enumerate(inside):
                if entry.is_of_hook:
                    check_not_overwritten(entry, overwritten(inside[position:]))
            self._attributes.refuse_own([span.entry], span.set_outside)
            self._leaves.reaching.note_leaf(span, opened.log)
            self._attributes.refuse_switch([span.entry] if span.entry.checkpoints else ())
            self._attributes.refuse_difference([span.entry], span.snapshot, own)
        for span in opened.spans:
            if span not in chosen and not span.is_inside(set(chosen)):
                self._scene.check_hooks(span.module)
                if span.refused is not None:
                    raise span.refused(span.entry.name)
        log = collapsed(opened.log, chosen)
        kept = {id(entry.outputs[0][1]) for entry in log if entry.kind is EntryKind.NUMBER}
        passed.pending[:] = [each for each in passed.pending if id(each.tensor) in kept]
        self._now.values = values = self._now.new_values()
        spans = {id(span.entry): span for span in chosen}
        at = opened.at
        everything = [*opened.known, *log]
        for span in done:
            self._leaves.lift(span.entry)
            self._leaves.aside.settle(span.entry, span.call)
        for position, entry in enumerate(everything):
            if entry.held and id(entry) in spans:
                span = spans[id(entry)]
                self._leaves.held.check(span, opened.log[span.start : span.end])
            if entry.question is not None:
                entry.question = self._again(entry.question, entry, everything[:position])
            values.take(entry)
        for entry in log:
            at.following.append(entry)
            at = entry
            if entry.kind is EntryKind.LEAF:
                self._leaves.end(entry)
        returned, _, assigned = opened.end.args
        assigned = {key: each for key, each in assigned.items() if key in self._buffers}
        opened.end.args = returned, tuple(each.tensor for each in passed.pending), assigned
        opened.end.way = way = self._way(values, everything, opened.end)
        if not opened.known:
            way.graph.tape = passed.profile.tape
        at.following.append(opened.end)
        return way

    def _again(self, question: Question, entry: Entry, log: list[Entry]) -> Question:
        """Returns a question as it can be asked again, now that tensors have their partitions."""
        assert self._now.values is not None
        if Question.of(entry, self._now.values, question.where).can_be_answered:
            return question
        return question_ahead(entry, log, self._now.new_values(), question.where)

    # ------------------------------------------------------------------ calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_GRADIENTS and self._gradients.concerns(func, args):
            return self._gradients.call(func, *args, **kwargs)
        if self._state.paused:
            return func(*args, **kwargs)
        refuse_reads(func, types, args, kwargs)
        self._state.backward_code += func in GIVING_BACKWARD_CODE
        self._state.gradient_reads += func in READING_GRADIENTS
        if func in UNRECORDED:
            if args and type(args[0]) is nn.Parameter:
                args = (self._now.fake(args[0]), *args[1:])
            if func == REQUIRING_GRADIENT:
                return self._now.requires_grad(args[0])
            return func(*args, **kwargs)
        if not self._state.leaf_depth:
            if isinstance(kwargs.get("generator"), torch.Generator):
                return self._new.draw(func, args, kwargs)
            if func == SETTING_DATA and self._only_numbers(*args):
                func = put_data
            elif func in SWITCHING_GRADIENTS and self._switches(func, args):
                return args[0]
            elif self._scene.frozen and self._reads_frozen((args, kwargs)):
                args, kwargs = map_tensors((args, kwargs), self._as_frozen)
                return self.__torch_function__(func, types, args, kwargs)
            elif is_foreach(func) and (len(args[0]) > 1):
                # Its tensors may lie on several partitions.
                call = functools.partial(self.__torch_function__, func, types)
                return one_by_one(call, args, kwargs)
            entry = self._known.match(EntryKind.CALL, func, args, kwargs)
            if entry is not None:
                return self._known.answer(entry, lambda: func(*args, **kwargs))
        elif (entry := self._known.repeated(func, args, kwargs)) is not None:
            return self._known.result(entry)
        if exchanges(func):
            self.note_exchange(func.__name__, kwargs.get("group"))
        self._refuse(func, args)
        if isinstance(func, OpOverload):
            return self._new.call_operator(func, args, kwargs)
        called = SETTING_DATA if func is put_data else func
        name = torch.overrides.resolve_name(called) or getattr(func, "__name__", str(func))
        try:
            return self._new.make(func, name, func, args, kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, SMPError) or PendingNumber.__name__ not in str(error):
                raise
        # It takes numbers alone.
        args, kwargs = fill((args, kwargs), PendingNumber, PendingNumber.value)
        return self.__torch_function__(func, types, args, kwargs)

    def _only_numbers(self, tensor: torch.Tensor, data: Any) -> bool:
        """Whether an assignment to ``.data`` gives a tensor of a model nothing but numbers."""
        fake = self._now.fake(tensor)
        if id(fake) not in self._scene.slots:
            return False
        with self._state.pausing():
            data = self._now.fake(data)
            return can_be_put(fake, data) and not self._scene.slots_in(data)

    def _switches(self, func: Any, args: Any) -> bool:
        """Has a parameter require no gradient, or again one, if it is one, for what comes then."""
        fake = self._now.fake(args[0])
        if id(fake) not in self._scene.slots:
            return False
        with self._state.pausing():
            self._scene.freeze(fake, not args[1] if len(args) > 1 else False)
        return True

    def _reads_frozen(self, arguments: Any) -> bool:
        return any(id(self._now.fake(each)) in self._scene.frozen for each in tensors_in(arguments))

    def _as_frozen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what code between modules reads of a parameter that requires no gradient now."""
        fake = self._now.fake(tensor)
        if id(fake) not in self._scene.frozen:
            return tensor
        slot = self._scene.frozen.pop(id(fake))
        with self._state.pausing():
            fake.requires_grad_(True)  # as all other reads of it find it
        try:
            found: torch.Tensor = self.__torch_function__(torch.Tensor.detach, (), (fake,))
        finally:
            self._scene.frozen[id(fake)] = slot
            with self._state.pausing():
                fake.requires_grad_(False)
        return found

    def _refuse(self, func: Any, args: Any) -> None:
        if func in HOOKING_GRADIENTS:
            self._check_hooked(args[0])
        if (
            func is torch.Tensor.__deepcopy__
            and not self._state.leaf_depth
            and id(self._now.fake(args[0])) in self._scene.slots
        ):
            raise UnsupportedError(
                f"a parameter or buffer is copied by copy.deepcopy in {self._calls.where()} while "
                "a pipelined step runs: one partition has its values. Copy it before training, or "
                "clone() it inside one module."
            )
        if func is torch.autograd.grad and not self._state.leaf_depth:
            self._gradients.check_asked(tensors_in(args[0]))
        if func is torch.Tensor.backward:
            raise UnsupportedError(
                "with more than one partition, tensor.backward() cannot reach the other "
                "partitions: call model.backward(tensor) on the DistributedModel instead."
            )

    def _check_hooked(self, tensor: torch.Tensor) -> None:
        """Makes sure that a module puts hooks on the gradients of its own parameters alone.

        Raises:
            UnsupportedError: it is another module's, whose rank does not run this one.
        """
        fake, module = self._now.fake(tensor), self._calls.current.module
        if module is None or id(fake) not in self._scene.slots:
            return
        self._state.parameter_hooks += 1
        leaf = self._scene.leaf_of.get(module, module)
        if not any(each is fake for each in leaf.parameters()):
            model, slot = self._scene.slots[id(fake)]
            raise NowhereError(
                f"{self._calls.where()} puts a hook on the gradient of {model.slot_name(slot)}, "
                "which another module has: the rank that computes its gradient would not know. "
                "Let that module do it, or do it before or between calls of step functions."
            )

    def call_function(
        self, target: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Stands in for a call that torch's function modes do not see."""
        if self._state.paused:
            return call(*args, **kwargs)
        refuse_reads(target, map(type, args), args, kwargs)
        function: Any = getattr(call, "__self__", None)
        # Those of this library know nothing of the user's modules.
        self._state.backward_code += not _is_own(function)
        if not self._state.leaf_depth:
            if self._state.is_glue and is_code_of_others(function.__module__):
                given = [each for each in args if not isinstance(each, torch.Tensor)]
                self._attributes.note_function(name, functools.partial(function.backward, *given))
            entry = self._known.match(EntryKind.CALL, target, args, kwargs)
            if entry is not None:
                return self._known.answer(entry, lambda: call(*args, **kwargs))
        elif (entry := self._known.repeated(target, args, kwargs)) is not None:
            return self._known.result(entry)
        return self._new.make(target, name, call, args, kwargs)

    def note_backward_code(self) -> None:
        """Notes that code of the user's will run in a backward pass."""
        self._state.backward_code += 1

    def note_exchange(self, name: str, group: ProcessGroup | None) -> None:
        """Notes that a function of ``torch.distributed`` is called.

        Raises:
            UnsupportedError: with ranks that have other modules; or by code that gives it stand-ins
                and is not run with tensors.
        """
        state = self._state
        if state.paused and not state.runs_for_real:
            return
        ranks = get_process_group_ranks(group)
        if state.paused and self._together.issuperset(ranks):
            return  # a module that they compute together runs for real
        refused = functools.partial(exchanges_stand_ins, name)
        if not self._companions.issuperset(ranks):
            raise refused(self._calls.where())
        self._only_inside(refused)

    def note_hook_of_node(self) -> None:
        """Notes that a node of autograd takes a hook.

        Raises:
            UnsupportedError: by code between the modules that stay whole.
        """
        if not self._state.paused:
            self.note_backward_code()
            self._state.parameter_hooks += 1  # for all that is known of the node
            self._only_inside(hooks_stand_ins)

    def _only_inside(self, refused: Callable[[str], UnsupportedError]) -> None:
        """Takes note of what only a module that stays whole can do."""
        state, span = self._state, self._now.span
        is_between = not state.runs_for_real and (state.is_glue or span is None)
        if is_between and not state.leaf_depth:
            raise refused(self._calls.where())
        if span is not None:
            span.refused = refused

    def _call_hook(self, hook: ForwardHook, args: Any, kwargs: Any) -> Any:
        """Stands in for the call of a forward hook."""
        return self._outside.call(hook, args, kwargs)

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for ``module(*args, **kwargs)`` during the run."""
        return self._leaves.call(call, module, args, kwargs)

    @contextlib.contextmanager
    def checkpointed(self, how: Again, objects: Sequence[Any]) -> Iterator[None]:
        """Gives what is recorded inside a region of its own, if a backward pass may come to it."""
        if not torch.is_grad_enabled():
            yield
            return
        # What is known writes to nothing.
        is_new = self._now.values is not None
        with self._state.pausing():
            watched = BuffersWatched(self._scene.buffers() if is_new else ())
        with self._state.checkpointed(how):
            yield
        with self._state.pausing():
            self._state.written_again += watched.written()
            if (tape := self._context.meter.tape) is not None:
                tape.hold(tensors_held(objects))

    def backward(self, model: nn.Module, tensors: Any, grad_tensors: Any) -> None:
        """Notes that the user asked for the gradients of ``tensors``, by a model of the user's."""
        if isinstance(tensors, torch.Tensor):
            tensors, grad_tensors = [tensors], None if grad_tensors is None else [grad_tensors]
        starts = [None] * len(tensors) if grad_tensors is None else grad_tensors
        with self._state.pausing():
            self._attributes.refuse_switch(self._now.calls_made_again())
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
                entry = self._known.match(EntryKind.BACKWARD, model, (tensor,), {})
                if entry is None:
                    args = self._now.template((tensor,), "model.backward")
                    entry = Entry(EntryKind.BACKWARD, model, "model.backward", args)
                    self._now.add(entry)
                    entry.result = self._gradients.reached(tensor)
                    self._differentiate(tensor)
                else:
                    self._known.answer(entry, lambda: None)
            self._gradients.arrive(tensor, entry)

    def _differentiate(self, root: torch.Tensor) -> None:
        """Has it noted what a backward pass holds, if none of the user's code would run in it."""
        state, tape = self._state, self._context.meter.tape
        if tape is None or state.backward_code or state.gradient_reads or state.parameter_hooks:
            return
        fakes = {id(fake): fake for model in self._scene.models for fake in model.slots.values()}
        leaves = [each for each in fakes.values() if each.is_leaf and each.requires_grad]
        tape.differentiate(root, leaves)


def _is_own(function: Any) -> bool:
    """Whether an autograd function is one of this library."""
    return isinstance(function, type) and function.__module__.startswith(_OWN_PACKAGE)
