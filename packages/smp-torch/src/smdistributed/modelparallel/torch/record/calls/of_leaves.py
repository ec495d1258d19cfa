"""Calls of modules: of leaves, of those that may turn out to be leaves, and of split ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import attributes_of
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.calls.activation_gradients import (
    ActivationGradients,
)
from smdistributed.modelparallel.torch.record.calls.aside import CallsAside
from smdistributed.modelparallel.torch.record.calls.held import HeldObjects
from smdistributed.modelparallel.torch.record.calls.known import KnownCalls
from smdistributed.modelparallel.torch.record.calls.outside import OutsideHooks
from smdistributed.modelparallel.torch.record.calls.reaching import Reaching
from smdistributed.modelparallel.torch.record.calls.refusals import switched_how
from smdistributed.modelparallel.torch.record.leaves.attributes import LeafAttributes
from smdistributed.modelparallel.torch.record.leaves.runs import Watch
from smdistributed.modelparallel.torch.record.leaves.spans import (
    Span,
    hooked_calls,
    inner_tensors,
    made_by_calls,
)
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch, gradient_lost
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber, plain
from smdistributed.modelparallel.torch.record.trace.taps import (
    call_hooks,
)
from smdistributed.modelparallel.torch.record.trace.tree import (
    Constant,
    Entry,
    EntryKind,
    Seen,
)
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.contents import Contents, copied, state_of
from smdistributed.modelparallel.torch.state.given import Given
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot
from smdistributed.modelparallel.torch.tensors.nested import (
    fill,
    map_tensors,
    placeholders,
    tensor_paths,
    tensors_in,
)
from smdistributed.modelparallel.torch.tensors.writes import large_arrays_copied


class LeafCalls:
    """Stands in for the calls of a model's modules.

    Args:
        context: of the recorder.
        now: the microbatch.
        known: calls that the trace has.
        attributes: of the leaves.
        gradients: that code looks at.
        outside: calls hooks that are lifted out of leaves.
        make_copy: see ``NewCalls.copy``.
    """

    def __init__(
        self,
        context: Context,
        now: Microbatch,
        known: KnownCalls,
        attributes: LeafAttributes,
        gradients: ActivationGradients,
        outside: OutsideHooks,
        make_copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._context = context
        self._make_copy = make_copy
        self._gradients = gradients
        self._outside = outside
        self._now = now
        self._known = known
        self._attributes = attributes
        self._scene = context.scene
        self._state = context.state
        self._calls = context.calls
        #: Knows what modules use that they are not given.
        self.reaching = Reaching(context, now)
        #: Calls leaves on the copies of objects with state.
        self.held = HeldObjects(context, now)
        #: Finds out what leaves keep.
        self.aside = CallsAside(context, now, attributes, gradients)

    def call(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for ``module(*args, **kwargs)``; ``call`` is the real call."""
        if module not in self._scene.names or self._state.paused:
            return call(module, *args, **kwargs)
        if self._state.outside:
            raise UnsupportedError(
                f"{self._calls.where()} calls {self._scene.names[module] or 'the model'}, and "
                "stores things, while a pipelined step runs. Call it in the step function, or in "
                "the forward of a module."
            )
        self._calls.follow_hooks()
        if self._gradients.is_lifted(module):
            return self._gradients.call_module(
                module, args, lambda args: self._call(call, module, args, kwargs)
            )
        return self._call(call, module, args, kwargs)

    def _call(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._state.leaf_depth:
            return self._now.call_inside(call, module, *args, **kwargs)
        if any(isinstance(each, PendingNumber) for each in (*args, *kwargs.values())):
            args, kwargs = self._numbers_known(module, args, kwargs)
        is_leaf = module in self._scene.leaves
        if is_leaf or module in self._scene.open:
            if not self._scene.has_its_own(module):
                self._now.functional[module] = None  # its code is that of a split one
            elif not is_leaf:
                return self._open_call(call, module, args, kwargs)
            elif (entry := self._known.match(EntryKind.LEAF, module, args, kwargs)) is not None:
                return self._answer(entry, call)
            else:
                return self._new_leaf(call, module, args, kwargs)
        self._scene.check_hooks(module)
        if self._now.values is None:
            return self._calls.follow(call, module, args, kwargs)
        return self._calls.call(call, module, *args, **kwargs)

    def _numbers_known(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns arguments with the numbers that are pending, where a module wants to know."""
        if not self._scene.runs_with_values(module):
            return args, kwargs
        known = {name: plain(each) for name, each in kwargs.items()}
        return tuple(map(plain, args)), known

    def end(self, entry: Entry) -> None:
        """Takes note that the call of a leaf is over."""
        with self._state.pausing():
            self._attributes.note_call(entry)
        for module, name, tensor in entry.hidden:
            self._attributes.hide(module, name, tensor)

    # Known leaves

    def _answer(self, entry: Entry, call: Callable[..., Any]) -> Any:
        """Returns what a known call gives."""
        now = self._now
        self._known.go_on(entry)
        if entry.seen is Seen.ALL:
            self._run_again(call, entry)
        else:
            self._calls.count(entry.target)
            now.grown += [each.again() for each in entry.left]
        if entry.repeats and not now.look_as_after(entry):
            with self._state.pausing():
                for tensor in entry.changed:
                    entry.specs[id(tensor)].give(tensor)
        if entry.seen is Seen.HOOKS:
            with (
                self._state.pausing(),
                self._attributes.shown_to(entry.target),
                self._gradients.calling_hooks(entry.target),
            ):
                for each in entry.hooked:
                    given = fill(each[1:], (Carried, Constant), now.given_for)
                    call_hooks(each.module, *given)
        self.end(entry)
        self._gradients.settle()
        if entry.effects:
            with self._state.pausing():
                for carried, effects in entry.effects:
                    now.contents[carried].apply(effects)
        self._outside.run(entry)
        return self._known.result(entry)

    def _run_again(self, call: Callable[..., Any], entry: Entry) -> None:
        """Runs a known leaf on fakes, for what code outside can see of it besides its result."""
        now = self._now
        with self._state.pausing(), self._attributes.shown_to(entry.target):
            values = now.go_live()
            args, kwargs = fill((entry.args, entry.kwargs), (Carried, Constant), now.given_for)
            again = functools.partial(now.call_inside, call, entry.target, *args, **kwargs)
            run = now.leaf_runs.run(values, entry.target, again)
        now.grown += run.grown
        now.note_again(entry, run)

    # New leaves

    def _new_leaf(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        now = self._now
        with self._state.pausing():
            values = now.go_live()
            args, kwargs = map_tensors((tuple(args), dict(kwargs)), now.fake)
            entry = self._entry(module, args, kwargs)
            watch = Watch(
                self._context.meter, self._context.random, self._state, module, (args, kwargs)
            )
            measured = functools.partial(now.call_inside, call, module)
            handed = self._handed(entry)
            given = self._given(args, kwargs)
            with self._attributes.shown_to(module):
                with self._gradients.aside():
                    on_copies = self.held.run_on_copies(entry, measured)
                run = now.leaf_runs.run(values, module, lambda: measured(*args, **kwargs))
                result = self._computed(run.result, (args, kwargs), self._stand_in)
                now.grown += run.grown
                entry.grown = run.grown
                entry.left = [each for each in run.grown if each.is_own]
                watch.tell(entry)
                entry.inner, entry.hooked = run.inner, run.hooked
                entry.hook_calls = run.hook_calls
                entry.checkpoints = run.done.has_regions
                self.reaching.note_run(entry, run)
                self._complete(entry, result, run.changes, handed, run.done.written)
            if (left := _left_behind(entry, given)) is not None:
                raise left
            self.held.compare(entry, run, on_copies)
            self.lift(entry)
            self.aside.settle(entry, call)
            now.add(entry)
            self.end(entry)
        self._gradients.settle()
        self._outside.run(entry, run.made)
        return result

    def lift(self, entry: Entry) -> None:
        """Notes what is lifted out of a leaf."""
        entry.lifted = self._scene.lifted.inside(entry.modules)
        entry.hooks = self._scene.forward_hooks_in(entry.modules)
        entry.lifts |= self._gradients.lifts
        if entry.lifts and entry.seen is Seen.NOTHING:
            entry.seen = Seen.HOOKS

    def _entry(self, module: nn.Module, args: Any, kwargs: Any) -> Entry:
        """Returns the entry of a leaf's call, before the call."""
        now = self._now
        name, where = self._scene.names[module] or "the model", self._calls.where()
        entry = Entry(EntryKind.LEAF, module, name, where=where)
        entry.args = now.template(tuple(args), f"{name} in {where}")
        entry.kwargs = now.template(dict(kwargs), f"{name} in {where}")
        entry.settings = self._context.settings()
        entry.region = self._state.region
        entry.modules = self._scene.inner_of(module)
        entry.flags = self._scene.flags_of(module)
        entry.frozen = self._scene.frozen_in(module)
        if entry.frozen and entry.region is not None:
            raise switched_how(*entry.frozen[0], f"in a checkpointed call, for {name}")
        entry.hooks = self._scene.forward_hooks_in(entry.modules)
        entry.refusal = gradient_lost(entry, tensors_in((args, kwargs)))
        entry.held = [
            (each, state_of(now.objects[each]))
            for each in dict.fromkeys(placeholders((entry.args, entry.kwargs), Carried))
        ]
        return entry

    def _handed(self, entry: Entry) -> dict[Carried, Contents]:
        """Returns what is in the objects that a leaf is given, before its call."""
        return {carried: Contents(self._now.objects[carried]) for carried, _ in entry.held}

    def _given(self, args: Any, kwargs: Any) -> Given:
        """Returns what is in the containers that a leaf is given, before its call."""
        return Given(args, kwargs, set(map(id, self._now.objects.values())))

    def _complete(
        self,
        entry: Entry,
        result: Any,
        changes: Sequence[Change],
        handed: Mapping[Carried, Contents],
        written: Iterable[torch.Tensor],
    ) -> None:
        """Completes the entry of a leaf's call, after the call."""
        self._now.keep_result(entry, result)
        self.reaching.tell_shown(entry, changes)
        memory = {storage_of(each) for each in written if each.layout is torch.strided}
        entry.effects = [
            (carried, effects)
            for carried, contents in handed.items()
            if (memory or not contents.is_current()) and (effects := contents.effects(memory))
        ]
        entry.changes = list(changes)

    def _computed(
        self, result: Any, given: Any, fake_for: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """Returns what a module gives, with fakes for what it has computed from none.

        Such are tensors that it keeps in attributes, and what it makes of these alone: Python that
        comes after it may not take their numbers of this moment for those of every step.
        """
        own = {id(each) for each in tensors_in(given)}
        found = {
            id(each)
            for each in tensors_in(result)
            if type(each) is torch.Tensor and not each.requires_grad and id(each) not in own
        }
        if not found:
            return result
        return map_tensors(result, lambda each: fake_for(each) if id(each) in found else each)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake for a tensor that a leaf gives."""
        fake = self._context.mode.from_tensor(tensor.detach())
        self._now.stood_in[id(fake)] = fake
        return fake

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns one for what a module gives that may turn out to be split: a copy, then."""
        fake = self._make_copy(tensor)
        self._now.stood_in[id(fake)] = fake
        return fake

    # Modules that may turn out to be leaves

    def _open_call(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Calls a module that may turn out to be a leaf."""
        now = self._now
        with self._state.pausing():
            now.go_live()
            assert now.new is not None
            if any(now.fake(each) is not each for each in tensors_in((args, kwargs))):
                # Else with the caller's own lists, which a module that is split may change.
                args, kwargs = map_tensors((tuple(args), dict(kwargs)), now.fake)
            now.check_known((args, kwargs), self._calls.current.module)
            entry = self._entry(module, args, kwargs)
            before = [(each, copied(now.objects[each])) for each, _ in entry.held]
            handed = self._handed(entry)
            given = self._given(args, kwargs)
            watch = Watch(
                self._context.meter, self._context.random, self._state, module, (args, kwargs)
            )
            snapshot = self._scene.snapshot(module, moved=self._scene.own_tensors)
            possible = len(self._state.possible)
            outer = now.span
            span = Span(module, outer, len(now.new), entry, snapshot, call, before)
            now.span = span
            now.spans.append(span)
        first = len(now.spans)
        try:
            with large_arrays_copied():
                result = self._calls.call(call, module, *args, **kwargs)
            with self._state.pausing():
                span.returned = [now.fake(each) for each in tensors_in(result)]
                result = self._computed(result, (args, kwargs), self._copy)
        except BaseException:
            span.failed = True
            raise
        finally:
            now.span = outer
            span.end = len(now.new)
        with self._state.pausing():
            now.check_known(result, module)
            watch.tell(entry)
            self._forget_outside(span)
            changes = [
                each
                for each in (*snapshot.note_changes(), *self._state.possible[possible:])
                if each.owner not in span.set_outside
            ]
            span.outputs = list(tensor_paths(result))
            entry.inner = inner_tensors(span, now.spans[first:], self._scene.names)
            for tap, tensor in made_by_calls(now.new[span.start : span.end], entry.region):
                entry.inner.setdefault(id(tensor), (tap, tensor))
            self.reaching.note_call(span, now.spans[first:], changes)
            inside = now.new[span.start : span.end]
            written = [tensor for each in inside for tensor in each.changed]
            self._complete(entry, result, changes, handed, written)
            span.left_behind = _left_behind(entry, given)
            entry.hooked = hooked_calls([span, *now.spans[first:]])
        return result

    def _forget_outside(self, span: Span) -> None:
        """Looks no longer at what only hooks reach that were found to be lifted out in a call."""
        if span.entry.hooks != self._scene.forward_hooks_in(span.entry.modules):
            hooks = self._scene.forward_hooks_of(span.module).lifted()
            own = self._scene.snapshot(span.module, moved=self._scene.own_tensors)
            span.snapshot.forget(Snapshot((), [each.function for each in hooks]), but_for=own)


def _left_behind(entry: Entry, given: Given) -> UnsupportedError | None:
    """Returns why what a module leaves for others is lost where it runs in another process."""
    if (refusal := given.refusal(entry.name, entry.where)) is not None:
        return refusal
    for _, tensor in entry.outputs:
        own = vars(tensor).keys() - attributes_of(tensor)
        if names := sorted(each for each in own if not each.startswith("_")):
            return UnsupportedError(
                f"{entry.name} sets the attribute {names[0]} on a tensor that it returns, in "
                f"{entry.where}: a tensor goes to another partition without. Return it beside "
                "the tensor."
            )
    return None
