"""Leaves that are called once more, aside: for what shows in no call, or on no fakes.

Such a call belongs to no microbatch, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from smdistributed.modelparallel.torch.record.calls.activation_gradients import (
    ActivationGradients,
)
from smdistributed.modelparallel.torch.record.calls.lifted_hooks import has_gradient_hooks
from smdistributed.modelparallel.torch.record.costs.meter import Profile
from smdistributed.modelparallel.torch.record.leaves.attributes import Deed, LeafAttributes
from smdistributed.modelparallel.torch.record.leaves.gradient_hooks import Moment
from smdistributed.modelparallel.torch.record.leaves.lending import in_place
from smdistributed.modelparallel.torch.record.leaves.runs import Watch
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.taps import hooks_of_packages_removed
from smdistributed.modelparallel.torch.record.trace.tree import Constant, Entry, Trace
from smdistributed.modelparallel.torch.record.trace.values import Values
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.snapshot import Change
from smdistributed.modelparallel.torch.tensors.nested import fill
from smdistributed.modelparallel.torch.trial.passes import PassTrial
from smdistributed.modelparallel.torch.trial.turns import keeps_state


class CallsAside:
    """Calls leaves aside.

    Args:
        context: of the recorder.
        now: the microbatch.
        attributes: of the leaves.
        gradients: that code looks at.
    """

    def __init__(
        self,
        context: Context,
        now: Microbatch,
        attributes: LeafAttributes,
        gradients: ActivationGradients,
    ) -> None:
        self._context = context
        self._now = now
        self._attributes = attributes
        self._gradients = gradients
        self._scene = context.scene
        self._state = context.state
        self._calls = context.calls

    def settle(self, entry: Entry, call: Callable[..., Any]) -> None:
        """Finds out which state a leaf keeps, and what follows, when it is known to be one."""
        if entry.asks:
            self._explore(entry, call)
        self._scene.settle(entry)
        self._try_passes(entry, call)

    def _explore(self, entry: Entry, call: Callable[..., Any]) -> None:
        """Finds out what a leaf that decides by an input changes for other numbers."""
        leaf = entry.target
        (args, kwargs), _ = self._call_again(call, entry)
        with self._aside(entry):
            watch = Watch(self._context.meter, self._context.random, self._state, leaf, ())
            snapshot = self._scene.snapshot(leaf)
            changes: list[Change] = []
            # What is not made for random numbers decides by others.
            with contextlib.suppress(Exception):
                _, changes = self._calls.on_random_numbers(call, leaf, args, kwargs)
            entry.changes += [*snapshot.note_changes(), *changes]
            for growth in snapshot.put_back():
                growth.remove()
            watch.tell_state(entry)

    def _try_passes(self, entry: Entry, call: Callable[..., Any]) -> None:
        """Finds out whether the passes of several microbatches may take turns in a leaf."""
        leaf, now = entry.target, self._now
        if entry.recomputes or (entry.region is not None and entry.stateful):
            entry.in_turn = "it is checkpointed, so its backward pass changes its state again"
            entry.sees_backward |= keeps_state(entry.stateful)
        changes = keeps_state(entry.stateful)
        found = self._scene.hooks_in(leaf)
        hooks = [(now.fake(hook.parameter), hook.function) for hook in found]
        entry.runs_backward |= bool(hooks) or any(
            has_gradient_hooks(each) and each not in entry.lifted for each in leaf.modules()
        )
        if any(hook.moment is not Moment.GRADIENT for hook in found):
            entry.in_turn = "its parameters have hooks that run when a gradient has been added up"
            entry.sees_backward = True
            return
        if any(hook.several for hook in found):
            entry.in_turn = "its parameters have hooks of several gradients"
            entry.sees_backward = True
            return
        if not (changes or entry.runs_backward):
            return
        arguments, again = self._call_again(call, entry)
        with self._aside(entry):
            assert now.values is not None
            watch = Watch(self._context.meter, self._context.random, self._state, leaf, ())
            trial = PassTrial(
                self._state,
                leaf,
                arguments,
                again,
                functools.partial(now.leaf_runs.run, now.values, leaf),
                functools.partial(now.leaf_runs.apart, now.values),
                hooks,
            )
            trial.run(keeps_state=changes, runs_code=entry.runs_backward)
            watch.tell_state(entry)
            entry.in_turn = trial.in_turn or entry.in_turn
            entry.sees_backward |= trial.sees_backward
            entry.rewrites = trial.rewrites
            if changes and (entry.decides or not self._is_clear()):
                # The trial shows one of its ways, and of some no backward pass.
                entry.in_turn = "it keeps state and decides by its input"
                entry.rewrites = True
        # What is added to a log stays with the rank, and so does what only hooks see.
        entry.changes = [
            each
            for each in trial.changes
            if each.owner or (each.added is None and self._scene.is_seen_by_code(each))
        ]
        self._scene.settle(entry)

    def _call_again(
        self, call: Callable[..., Any], entry: Entry
    ) -> tuple[tuple[Any, Any], Callable[[], Any]]:
        """Returns the arguments of a leaf's call, and what makes it again."""

        def stand_in(placeholder: Carried | Constant) -> Any:
            if isinstance(placeholder, Constant):
                return placeholder.tensor
            return placeholder.stand_in()

        def arguments() -> tuple[Any, Any]:
            filled: tuple[Any, Any] = fill(
                (entry.args, entry.kwargs), (Carried, Constant), stand_in
            )
            return filled

        def again() -> Any:
            # With objects as they were: a cache has not what the last call has put into it.
            args, kwargs = arguments()
            return self._now.call_inside(call, entry.target, *args, **kwargs)

        return arguments(), again

    def deed_of(self, call: Callable[..., Any], entry: Entry) -> Deed | None:
        """Returns what the call of a leaf does now; None where fakes do not show it."""
        leaf, now = entry.target, self._now
        _, again = self._call_again(call, entry)
        with self._aside(entry):
            assert now.values is not None
            run = now.leaf_runs.run(now.values, leaf, again)
            is_clear = self._is_clear()
        for growth in run.grown:
            growth.remove()
        if not is_clear:
            return None
        read = [now.constants.given(e) if isinstance(e, Constant) else e for e in run.read]
        return Deed(run.lines, read)

    def _is_clear(self) -> bool:
        """Whether all modules that were called since it began could run on fakes."""
        return not any(each.opaque for each in self._calls.profile.modules.values())

    @contextlib.contextmanager
    def _aside(self, entry: Entry) -> Iterator[None]:
        """Runs a leaf for what it shows; such a run belongs to no microbatch."""
        now = self._now
        kept = now.values, now.leaf_runs, self._calls.profile
        now.values = Values(self._scene, self._state, Trace([]), self._calls.where)
        now.leaf_runs = now.new_runs()
        self._calls.profile = Profile()
        try:
            with (
                self._calls.uncounted(),
                self._attributes.shown_to(entry.target),
                in_place(entry),
                self._gradients.aside(),
                self._scene.lifted.taken_off(entry.lifted),
                hooks_of_packages_removed(entry.target),
            ):
                yield
        finally:
            now.values, now.leaf_runs, self._calls.profile = kept
