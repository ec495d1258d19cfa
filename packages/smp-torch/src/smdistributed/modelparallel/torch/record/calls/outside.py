"""Runs the forward hooks that are lifted out of modules that stay whole (``forward_hooks``).

They are code outside: what they compute from activations is written down behind the call of the
module, numbers are pending, questions are answered ahead, and what they store is stored in each
microbatch, on every rank.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    FakeTensor,
    past_recording,
)
from smdistributed.modelparallel.torch.record.calls.activation_gradients import (
    ActivationGradients,
)
from smdistributed.modelparallel.torch.record.calls.forward_hooks import (
    ForwardHook,
    HookCall,
    Spot,
)
from smdistributed.modelparallel.torch.record.leaves.attributes import LeafAttributes
from smdistributed.modelparallel.torch.record.leaves.spans import Span
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.overwritten import overwritten
from smdistributed.modelparallel.torch.record.trace.tree import Entry
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot
from smdistributed.modelparallel.torch.state.switches import Settings
from smdistributed.modelparallel.torch.tensors.functions import GIVING_VALUES, SHOWING
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, opaque_objects, tensors_in
from smdistributed.modelparallel.torch.tensors.writes import arrays_as_they_are, writes_of
from smdistributed.modelparallel.torch.trial.on_random_numbers import (
    random_like,
    same_numbers_everywhere,
)


class OutsideHooks:
    """Calls the forward hooks of a model's modules, in one microbatch.

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

    # ------------------------------------------------------------------ calls

    def call(self, hook: ForwardHook, args: Any, kwargs: Any) -> Any:
        """Stands in for the call of a hook."""
        module, state = hook.spot.module, self._state
        hooks = self._scene.forward_hooks_of(module)
        is_within = state.leaf_depth or module in self._scene.leaf_of or state.is_open
        if is_within and hooks.is_lifted(hook) is None and not state.runs_for_real:
            hooks.decide(hook, self._can_be_lifted(hook, args, kwargs))
            self._scene.forget_reach()
        if not is_within or not hooks.is_lifted(hook):
            return hook.function(*args, **kwargs)
        if state.replaces_fakes:
            raise UnsupportedError(
                f"{_name(self._scene.names, hook.spot)} stores things, within a module that "
                "decides by the values of its activations: nobody knows ahead what its modules are "
                "called with. Put the hook on the module that decides, or on one around it."
            )
        if state.runs_for_real:
            return None
        position = hooks.at(hook.spot).index(hook)
        settings = self._context.settings()
        call = HookCall(hook.spot, position, args, kwargs, settings, self._num_made())
        if state.leaf_depth:
            self._check_region(call)
            self._now.leaf_runs.note_hook(call)
        elif state.is_open and not state.paused:
            self._run_within(hook, call)
        return None

    def run(self, entry: Entry, made: Sequence[Entry] = ()) -> None:
        """Runs the hooks that are lifted out of a leaf, when its call is over.

        Args:
            entry: the call.
            made: what the leaf has called; of a known one, whose hooks compute what is known, none.
        """
        found = [(self._at(call.spot)[call.position], call) for call in entry.hook_calls]
        for hook, call in found:
            if hook not in self._at(call.spot):
                continue  # one before has taken it off
            with self._state.pausing():
                self._now.overwritten = overwritten(made[call.start :])
            try:
                self._run(hook, call, [entry])
            finally:
                self._now.overwritten = frozenset()

    def _at(self, spot: Spot) -> list[ForwardHook]:
        return self._scene.forward_hooks_of(spot.module).at(spot)

    def _num_made(self) -> int:
        values = self._now.values
        return len(values.made) if values is not None and self._state.leaf_depth else 0

    def _check_region(self, call: HookCall) -> None:
        if self._state.region is not None:
            raise UnsupportedError(
                f"{_name(self._scene.names, call.spot)} stores what it computes, in a call that is "
                "checkpointed: it runs once more in the backward pass. Put it on a module outside "
                "of the checkpointed call."
            )

    # ------------------------------------------------------------------ as code outside

    def _run_within(self, hook: ForwardHook, call: HookCall) -> None:
        """Runs a hook of a module that may turn out to be a leaf, or be in one."""
        self._check_region(call)
        around = list(_spans_around(self._now.span))
        places = self._run(hook, call, [span.entry for span in around])
        for span in around:
            span.entry.hook_calls.append(call)
            span.set_outside = {**places, **span.set_outside}

    def _run(
        self, hook: ForwardHook, call: HookCall, entries: Sequence[Entry]
    ) -> dict[tuple[nn.Module, str], Any]:
        """Runs a hook.

        Args:
            hook: the hook.
            call: its call.
            entries: the calls of modules that it is lifted out of.

        Returns:
            the attributes of modules that it has set, with what was there before.
        """
        now, state = self._now, self._state
        name = _name(self._scene.names, call.spot)
        leaf = self._scene.leaf_of.get(hook.spot.module)
        questions, log = state.questions, len(now.log)
        tensors = tensors_in((call.args, call.kwargs))
        before, held = self._writes(tensors), list(map(sys.getrefcount, tensors))
        span, now.span = now.span, None
        state.outside += 1
        try:
            with (
                self._context.calls.outside(name),
                self._attributes.set_by_hooks(leaf) as places,
                self._gradients.calling_hooks(hook.spot.module),
                arrays_as_they_are(),
                _under(call.settings, self._context.settings),
            ):
                # Code of other microbatches may have changed containers.
                args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: tensor)
                result = hook.function(*args, **kwargs)
                del args, kwargs
        finally:
            state.outside -= 1
            now.span = span
            state.questions = questions
        if result is not None or self._writes(tensors) != before:
            raise UnsupportedError(
                f"{name} changes what its module computes in some calls, and stores things in "
                "others. Let one hook do the one, and another the other."
            )
        if any(entry.draw is not None for entry in now.log[log:]):
            raise UnsupportedError(
                f"{name} stores things, and draws random numbers in some calls. Draw them from a "
                "torch.Generator of your own."
            )
        if now.values is not None:
            # Where it stores them nobody may have asked for them, but the script may read them.
            kept = [each for each, was in zip(tensors, held, strict=True) if _is_held(each, was)]
            self._keep(kept, entries)
        if leaf is not None:
            self._attributes.note_set(leaf, places)
        return places

    def _keep(self, tensors: Sequence[torch.Tensor], entries: Sequence[Entry]) -> None:
        assert self._now.values is not None
        for entry in entries:
            entry.kept_by_hooks += tensors
        if self._state.is_glue:
            with self._state.pausing():
                for tensor in tensors:
                    self._now.values.of(self._now.fake(tensor))

    def _writes(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        with self._state.pausing():
            return list(map(writes_of, tensors))

    # ------------------------------------------------------------------ which ones

    def _can_be_lifted(self, hook: ForwardHook, args: Any, kwargs: Any) -> bool:
        """Tries out whether a hook only stores things, where no module around it sees them."""
        tensors = tensors_in((args, kwargs))
        if self._state.region is not None or not (
            all(isinstance(each, FakeTensor) for each in tensors)
            and not any(True for _ in opaque_objects((args[1:], kwargs)))
        ):
            return False  # it is given what each microbatch has anew
        device = self._context.device
        with (
            self._context.calls.trying(),
            self._context.calls.uncounted(),
            same_numbers_everywhere([device] if device.type == "cuda" else []),
        ):
            # The second time, where it goes by the numbers of the first.
            changes = self._try(hook, args, kwargs) or self._try(hook, args, kwargs)
            around = self._scene.seen_around(hook.spot.module)
        return bool(changes) and not any(map(around.sees, changes))

    def _try(self, hook: ForwardHook, args: Any, kwargs: Any) -> list[Change]:
        """Returns what a hook changes, put back; nothing if it does not only change Python."""
        given = map_tensors((args, kwargs), _stand_in)
        states = [(each, writes_of(each)) for each in tensors_in(given)]
        before = Snapshot([hook.spot.module], [hook.function])
        meter = self._context.meter
        draws = meter.reading().random_draws
        try:
            with (
                _Guesses(self._context),
                arrays_as_they_are(),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                is_wrong = hook.function(*given[0], **given[1]) is not None
        except Exception:
            is_wrong = True
        finally:
            changes = before.note_changes()
            for growth in before.put_back():
                growth.remove()
        is_wrong |= any(writes_of(each) != was for each, was in states)
        return [] if is_wrong or meter.reading().random_draws != draws else changes


def _name(names: dict[nn.Module, str], spot: Spot) -> str:
    return f"a forward hook of {names[spot.module] or 'the model'}"


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a hook is tried out on: the result of a computation, too."""
    made = torch.empty_like(tensor, requires_grad=False)
    return made.requires_grad_().view_as(made) if tensor.requires_grad else made


def _is_held(tensor: torch.Tensor, former: int) -> bool:
    """Whether more hold a tensor than did: who calls holds it once more."""
    return sys.getrefcount(tensor) - 1 > former


def _spans_around(span: Span | None) -> Iterator[Span]:
    while span is not None:
        yield span
        span = span.parent


@contextlib.contextmanager
def _under(settings: Settings, now: Callable[[], Settings]) -> Iterator[None]:
    """Inside, grad mode and autocast are as they were where a hook was called."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(settings.grad_enabled))
        cast = dict(settings.autocast)
        for device in {*cast, *dict(now().autocast)}:
            stack.enter_context(
                torch.autocast(device, dtype=cast.get(device), enabled=device in cast)
            )
        if now() != settings:
            raise UnsupportedError(
                "a forward hook that stores things is called under switches of PyTorch's backends, "
                "or another default type, that a module sets. Set them around the step."
            )
        yield


class _Guesses(TorchFunctionMode):
    """Gives any numbers to who asks for those of tensors that have none."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in GIVING_VALUES and func not in SHOWING:
            try:
                return func(*args, **kwargs)
            except DATA_DEPENDENT:
                pass
        with self._context.calls.uncounted(), past_recording():
            args, kwargs = map_tensors((tuple(args), dict(kwargs)), random_like)
            result = func(*args, **kwargs)
        return map_tensors(result, self._context.mode.from_tensor)
