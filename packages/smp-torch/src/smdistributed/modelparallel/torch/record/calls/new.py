"""Calls of torch functions that the trace does not have: made on fakes and written down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    FakeTensor,
    OpOverload,
    inside_transform,
    past_recording,
)
from smdistributed.modelparallel.torch.record.calls.refusals import refusal
from smdistributed.modelparallel.torch.record.microbatch import (
    Array,
    Context,
    Microbatch,
    gradient_lost,
    not_of_the_model,
)
from smdistributed.modelparallel.torch.record.questions.question import Question
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind
from smdistributed.modelparallel.torch.tensors.functions import SHOWING
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, opaque_objects, tensors_in
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec
from smdistributed.modelparallel.torch.tensors.stand_ins import STAND_INS
from smdistributed.modelparallel.torch.tensors.writes import writes_of
from smdistributed.modelparallel.torch.trial.on_random_numbers import works_for_real


class NewCalls:
    """Makes calls of torch functions, and writes them down.

    Args:
        context: of the recorder.
        now: the microbatch.
    """

    def __init__(self, context: Context, now: Microbatch) -> None:
        self._context = context
        self._now = now
        self._state = context.state

    def make(self, target: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call, and returns what it gives.

        Args:
            target: the function.
            name: of the function.
            call: calls it.
            args, kwargs: its arguments.
        """
        if not self._state.leaf_depth and inside_transform():
            raise UnsupportedError(
                f"{name} was called in {self._context.calls.where()} inside a transform of "
                "torch.func (vmap, grad, vjp, jvp): it shows the calls of the transformed "
                "function, not what it makes of them. Put it into a module that stays whole."
            )
        with self._state.pausing():
            tensors = tensors_in((args, kwargs))
            if any(not isinstance(tensor, FakeTensor) for tensor in tensors):
                args, kwargs = map_tensors((tuple(args), dict(kwargs)), self._now.fake)
                tensors = tensors_in((args, kwargs))
                if not self._state.leaf_depth and not any(
                    isinstance(tensor, FakeTensor) for tensor in tensors
                ):
                    return self._make_for_real(name, lambda: call(*args, **kwargs), tensors)
            elif not tensors and not self._state.leaf_depth and _arrays((args, kwargs)):
                with past_recording():
                    return call(*args, **kwargs)
            self._now.go_live()
            return self._make_on_fakes(target, name, lambda: call(*args, **kwargs), args, kwargs)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Writes down that a tensor is copied that no step computes; returns the copy's fake."""
        entry = Entry(EntryKind.CALL, torch.clone, "clone", where=self._context.calls.where())
        entry.args = self._now.template((tensor,), entry.name)
        entry.settings = self._context.settings()
        entry.region = self._state.region
        fake = self._context.mode.from_tensor(tensor.detach())
        self._now.keep_result(entry, fake)
        self._now.add(entry)
        return fake

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draws from what the user has seeded: the same numbers on every rank, for real."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
            name = torch.overrides.resolve_name(func) or str(func)
            raise UnsupportedError(
                f"{name} in {self._context.calls.where()} draws from generators that the step has "
                "seeded, for a tensor that is not computed yet. Draw a new tensor "
                "(torch.rand(shape)), or inside a module that stays whole."
            )
        if not tensors_in((args, kwargs)) and "device" not in kwargs:
            # A default device is a mode too, and not asked below.
            kwargs = {**kwargs, **_default_device()}
        with past_recording():
            return func(*args, **kwargs)

    def call_operator(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Calls an operator itself; one without tensors is no part of what is computed.

        Such are annotations for profilers.
        """
        result = func(*args, **kwargs)
        if (
            self._state.is_glue
            and "lift_fresh" not in str(func)
            and tensors_in((args, kwargs, result))
        ):
            raise UnsupportedError(
                f"{func} was called from {self._context.calls.where()} past PyTorch's function "
                "overrides (a scripted or custom function); put that module on one partition."
            )
        return result

    def _make_for_real(
        self, name: str, call: Callable[[], Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Makes a call on tensors that no step computes: it is Python, like a number's."""
        states = [writes_of(tensor) for tensor in tensors]
        span = self._now.span
        with past_recording():
            before = [tensor.clone() for tensor in tensors] if span is not None else []
            result = call()
            if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(result)):
                raise UnsupportedError(not_of_the_model(f"{name} in {self._context.calls.where()}"))
        for position, tensor in enumerate(tensors):
            if writes_of(tensor) != states[position]:
                outer = span
                while outer is not None:
                    outer.written.append((tensor, before[position]))
                    outer = outer.parent
        return result

    def _make_on_fakes(
        self, target: Any, name: str, call: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        now, meter, calls = self._now, self._context.meter, self._context.calls
        where = calls.where()
        if self._state.is_open and not self._state.leaf_depth:
            now.check_known((args, kwargs), calls.current.module)
        entry = Entry(EntryKind.CALL, target, name, where=where)
        entry.args = now.template(tuple(args), f"{name} in {where}")
        entry.kwargs = now.template(dict(kwargs), f"{name} in {where}")
        entry.settings = self._context.settings()
        entry.region = self._state.region
        if target in SHOWING and self._is_between():
            return self._decide(entry, RuntimeError("a stand-in has no numbers to show"))
        tensors = tensors_in((args, kwargs))
        assert now.values is not None
        specs = [(tensor, TensorSpec.of(tensor)) for tensor in now.values.sharing(tensors)]
        states = [writes_of(tensor) for tensor in tensors]
        reading, writes = meter.reading(), meter.writes
        try:
            with (
                contextlib.nullcontext() if self._state.leaf_depth else self._context.random.kept()
            ):
                result = STAND_INS[target](*args, **kwargs) if target in STAND_INS else call()
        except DATA_DEPENDENT as error:
            return self._decide(entry, error)
        except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
            if not self._state.leaf_depth and works_for_real(target, args, kwargs):
                try:
                    return self._decide(entry, error)
                except UnsupportedError:
                    raise UnsupportedError(
                        f"{entry} cannot be recorded: {error} Put it into a module that stays "
                        "whole, or outside the step function."
                    ) from error
            raise
        if meter.random_draws > reading.random_draws:
            if not self._state.leaf_depth and now.is_seeded():
                return self.draw(target, args, kwargs)
            entry.draw = calls.current.next_draw(target)
        entry.work = meter.work_since(reading)
        entry.refusal = refusal(target, where) or gradient_lost(entry, tensors)
        _check_out(entry, kwargs.get("out"), specs)
        others = {id(tensor) for tensor, before in specs if now.trace.note_change(tensor, before)}
        entry.repeats = bool(others)
        entry.changed = [
            tensor
            for tensor, state in zip(tensors, states, strict=True)
            if writes_of(tensor) != state or id(tensor) in others
        ]
        if meter.writes > writes or any(
            not isinstance(tensor, FakeTensor) for tensor in entry.changed
        ):
            entry.changed = []
            entry.refusal = (
                f"{entry} changes a tensor in place that belongs to no DistributedModel and to no "
                "argument. The step computes the change elsewhere: make the tensor a buffer of a "
                "module that is not split, or return what changes it and do that outside."
            )
        now.keep_result(entry, result)
        now.add(entry)
        return result

    def _is_between(self) -> bool:
        """Whether code between modules runs: no module that may turn out to be a leaf."""
        span = self._now.span
        is_within = span is not None and span.module not in self._context.scene.roots
        return not self._state.leaf_depth and not is_within

    def _decide(self, entry: Entry, error: Exception) -> Any:
        """Answers a question about data, if that can be done before the step runs."""
        now = self._now
        assert now.values is not None
        where = f"{entry.name} in {entry.where}"
        given, now.given = now.given, None
        question = Question.of(entry, now.values, where)
        if not question.can_be_answered:
            if question.function is torch.Tensor.item and not self._state.leaf_depth:
                return self._take_number(entry)
            assert now.ahead is not None
            try:
                question = now.ahead.question(entry, where)
            except UnsupportedError as refusal:
                raise refusal from error
        if given is None:
            answer = now.ask(question)
        else:
            question, answer = given
        self._state.questions += 1
        entry.kind = EntryKind.QUESTION
        entry.question, entry.answer = question, answer
        result = question.result(answer, self._context.mode, self._context.device)
        now.keep_result(entry, result)
        now.add(entry)
        if not self._state.leaf_depth:
            now.arrays += [Array(each, where, now.span) for each in _arrays(result)]
        return result

    def _take_number(self, entry: Entry) -> Any:
        """Returns what stands for the number in a tensor that is not computed yet."""
        entry.kind = EntryKind.NUMBER
        (tensor,) = entry.args
        self._now.keep_result(entry, tensor.detach())
        self._now.add(entry)
        return self._now.number(entry)


def _default_device() -> dict[str, torch.device]:
    device = torch.get_default_device()
    return {} if device.type == "cpu" else {"device": device}


def _arrays(obj: Any) -> list[Any]:
    """Returns the arrays of NumPy in a structure."""
    return [each for each in opaque_objects(obj) if type(each).__module__ == "numpy"]


def _check_out(entry: Entry, out: Any, specs: Sequence[tuple[torch.Tensor, TensorSpec]]) -> None:
    """Raises if a function has given the tensor another size that it was to write to.

    PyTorch is about to refuse that too, but for empty ones. Other microbatches have the old size.
    """
    written = {id(each) for each in tensors_in(out)}
    for tensor, before in specs:
        now = tuple(tensor.shape)
        if id(tensor) in written and 0 not in before.shape and now != before.shape:
            raise UnsupportedError(
                f"{entry} was given out= of shape {before.shape}, and gives {now}: give a tensor "
                "of that shape, or none, and use what is returned."
            )
