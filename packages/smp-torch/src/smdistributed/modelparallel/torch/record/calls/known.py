"""Calls that the trace has: the entries that follow are compared with a call, and answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.leaves.lending import known_in
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.questions.question import Question, same_answer
from smdistributed.modelparallel.torch.record.trace.tree import Constant, Entry, EntryKind
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.state.contents import Contents, same_in_objects, state_of
from smdistributed.modelparallel.torch.state.switches import Settings
from smdistributed.modelparallel.torch.tensors.nested import fill, same

#: What a call of a torch function may be in a trace.
_KINDS_OF_CALLS = (EntryKind.CALL, EntryKind.QUESTION, EntryKind.NUMBER)


class KnownCalls:
    """Answers calls from the trace.

    Args:
        context: of the recorder.
        now: the microbatch.
    """

    def __init__(self, context: Context, now: Microbatch) -> None:
        self._context = context
        self._now = now

    def match(self, kind: EntryKind, target: Any, args: Any, kwargs: Any) -> Entry | None:
        """Returns the following entry that is this call; None if none is."""
        now = self._now
        following = now.at.following
        if not following or now.new is not None:
            return None
        settings: Settings | None = None
        for entry in following:
            if (entry.target is not target and entry.target != target) or (
                entry.kind is not kind
                and (kind is not EntryKind.CALL or entry.kind not in _KINDS_OF_CALLS)
            ):
                continue
            num_constants, num_objects = len(now.constants), len(now.objects)
            if same(entry.args, args, self._special) and same(entry.kwargs, kwargs, self._special):
                if entry.settings is not None:
                    settings = settings or self._context.settings()
                if entry.settings in (None, settings) and self._is_same_place(entry):
                    if entry.question is None:
                        return entry
                    return self._answered(entry.question, following)
            now.constants.forget_after(num_constants)
            for carried in list(now.objects)[num_objects:]:
                del now.objects[carried]
                now.contents.pop(carried, None)
        return None

    def go_on(self, entry: Entry) -> None:
        """Takes an entry as the one that has come."""
        now = self._now
        now.at = entry
        now.log.append(entry)
        if now.values is not None:
            with self._context.state.pausing():
                now.values.take(entry)

    def answer(self, entry: Entry, call: Callable[[], Any]) -> Any:
        """Returns what a known call of a torch function gives."""
        self.go_on(entry)
        if entry.draw is not None:
            self._context.calls.current.draws += 1
        if entry.repeats and not self._now.look_as_after(entry):
            with self._context.state.pausing():
                call()
        if entry.kind is EntryKind.NUMBER:
            return self._now.number(entry)
        return self.result(entry)

    def result(self, entry: Entry) -> Any:
        """Returns the recorded result."""
        if entry.is_fixed:
            return entry.result
        return fill(entry.result, Carried, self._now.objects.get)

    def repeated(self, target: Any, args: Any, kwargs: Any) -> Entry | None:
        """Returns the call that a leaf made before and makes again; None if it makes another one.

        It is the next one of the repetition that goes on.
        """
        repetition = self._now.repetition
        entry = None if repetition is None else repetition.coming
        if repetition is None or entry is None:
            return None
        num_constants = len(self._now.constants)
        if (
            (entry.target is target or entry.target == target)
            and same(entry.args, args, self._is_same_tensor)
            and same(entry.kwargs, kwargs, self._is_same_tensor)
            and entry.settings == self._context.settings()
            and self._is_same_place(entry)
        ):
            repetition.go_on()
            if entry.draw is not None:
                self._context.calls.current.draws += 1
            return entry
        self._now.constants.forget_after(num_constants)
        repetition.differs = True
        return None

    def _is_same_tensor(self, want: Any, got: Any) -> bool:
        return not isinstance(want, Carried) and self._special(want, got)

    def _is_same_place(self, entry: Entry) -> bool:
        """Whether what an entry depends on besides its arguments is as it was."""
        context = self._context
        if entry.region != context.state.region:
            return False
        if entry.draw is not None and (
            entry.draw != context.calls.current.coming_draw or self._now.is_seeded()
        ):
            return False
        if entry.kind is not EntryKind.LEAF:
            return True
        return (
            entry.flags == context.scene.flags_of(entry.target)
            and entry.frozen == context.scene.frozen_in(entry.target)
            and entry.lifted == context.scene.lifted.inside(entry.modules)
            and entry.hooks == context.scene.forward_hooks_in(entry.modules)
            and all(self._is_in_state(carried, before) for carried, before in entry.held)
            and self._is_lent(entry)
        )

    def _is_lent(self, entry: Entry) -> bool:
        """Whether a leaf would find what was lent to it, wherever any call of it looks."""
        spots = self._context.scene.lent.get(entry.target, {})
        return len(spots) == len(entry.lent) and all(
            same(content, known_in(spot.read()), self._special) for spot, content in entry.lent
        )

    def _is_in_state(self, carried: Carried, before: Any) -> bool:
        """Whether an object with state is as it was when it was handed to a leaf."""
        now = self._now
        obj = now.objects[carried]
        contents = now.contents.get(carried)
        if contents is not None and contents.is_current():
            return True  # what leaves have made of it, nobody has changed
        now.contents[carried] = Contents(obj)
        return same(before, state_of(obj), same_in_objects)

    def _special(self, want: Any, got: Any) -> bool:
        """Compares what is neither identical nor a plain value."""
        now = self._now
        if isinstance(want, Constant):
            return (
                isinstance(got, torch.Tensor)
                and not isinstance(got, FakeTensor)
                and self._context.scene.fake_of(got) is None
                and now.constants.stands_for(want, got)
            )
        if isinstance(want, torch.Tensor):
            return isinstance(got, torch.Tensor) and now.fake(got) is want
        if isinstance(want, Carried):
            if want in now.objects:
                return now.objects[want] is got
            if type(got) is not type(want.pristine) or not same(
                want.state, state_of(got), same_in_objects
            ):
                return False
            now.objects[want] = got
            now.contents[want] = Contents(got)
            return True
        return False

    def _answered(self, question: Question, following: Sequence[Entry]) -> Entry | None:
        """Asks a question that is known; returns the entry for its answer, if there is one."""
        answer = self._now.ask(question)
        for entry in following:
            if entry.question is question and same_answer(entry.answer, answer):
                return entry
        self._now.given = question, answer
        return None
