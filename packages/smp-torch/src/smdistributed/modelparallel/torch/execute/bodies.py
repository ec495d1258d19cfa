"""The body of a step function with one partition: what runs it for one microbatch after another.

A body is all that the step function does for a microbatch, its backward pass included. It runs as
it is, is taken down on a tape meanwhile, or confirms what was captured from its tape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import saved_tensors_hooks
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    past_function_modes,
)
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.execute.taping import Draws, not_counted
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.tape.answers import is_answered
from smdistributed.modelparallel.torch.tape.recording import Recording
from smdistributed.modelparallel.torch.tape.tape import Made, Tape
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, tensors_in
from smdistributed.modelparallel.torch.trial.turns import code_of_others_seen

#: The arguments of one microbatch.
Call = tuple[Sequence[Any], Mapping[str, Any]]
Body = Callable[[Call], Any]


class Bodies(Protocol):
    """Runs the bodies of one mini-batch."""

    def run(self, call: Call, body: Body) -> Any:
        """Returns what the body of the next microbatch gives.

        Args:
            call: its arguments.
            body: takes them.
        """

    def differentiating(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a backward pass of the microbatch runs."""

    def refuse(self, why: str) -> None:
        """Says why bodies that do this run as they are."""


class AsTheyAre:
    """See ``Bodies``."""

    def run(self, call: Call, body: Body) -> Any:
        """See ``Bodies``."""
        return body(call)

    def differentiating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Bodies``."""
        return contextlib.nullcontext()

    def refuse(self, why: str) -> None:
        """See ``Bodies``."""


class Arguments:
    """The arguments of a body.

    Args:
        call: the arguments.

    Attributes:
        tensors: those in them, each once.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.tensors = list({id(each): each for each in tensors_in(call)}.values())

    def with_others(self, others: Sequence[torch.Tensor]) -> Call:
        """Returns the arguments with other tensors in the places of their own."""
        by_identity = {id(own): other for own, other in zip(self.tensors, others, strict=True)}
        found: Call = map_tensors(self._call, lambda own: by_identity[id(own)])
        return found


class BodyTape(NamedTuple):
    """What was taken down of a body.

    Attributes:
        tape: its calls.
        num_draws: how often random numbers were drawn.
        differentiates: it has a backward pass.
        is_inside: that is part of a call of the tape, as of ``loss.backward()``.
    """

    tape: Tape
    num_draws: int
    differentiates: bool
    is_inside: bool


class TakenDown:
    """Bodies that run as they are, and are taken down; see ``Bodies``.

    Args:
        device: where they compute.
        devices: the types of those that autocast may be on for.
        random: of the step.
        fakes: of what compiled modules are given.
        modules: whose code runs.
        are_alike: the microbatches look alike: what the first one does is taken for what all do. A
            pass that does something else is found out when its Python is to confirm the tape.

    Attributes:
        tapes: of the microbatches that have run.
    """

    def __init__(
        self,
        device: torch.device,
        devices: tuple[str, ...],
        random: Draws,
        fakes: FakeTensorMode,
        modules: Sequence[nn.Module],
        *,
        are_alike: bool,
    ) -> None:
        self._are_alike = are_alike
        self._device = device
        self._devices = devices
        self._random = random
        self._fakes = fakes
        self._modules = modules
        self.tapes: list[BodyTape] = []
        self._recording: Recording | None = None
        #: Of each backward pass, whether a call of the tape runs it.
        self._passes: list[bool] = []
        #: Whose code the backward pass in progress has run.
        self._seen: set[str] = set()
        #: The state of modules in the backward pass in progress, once it was looked at.
        self._state: Snapshot | None = None

    def run(self, call: Call, body: Body) -> Any:
        """See ``Bodies``."""
        given = Arguments(call).tensors
        if (alike := self._alike(given)) is not None:
            self.tapes.append(alike)
            return body(call)
        versions = list(map(version_of, given))
        self._recording = recording = Recording(
            self._device,
            self._devices,
            given,
            [],
            self._recomputed,
            self._fakes,
            is_given_ahead=True,
            known_hooks=saved_tensors_hooks(),
        )
        self._passes = []
        draws_before = sum(self._random.draws)
        try:
            # Backward passes run in this thread, where the profiler is.
            with (
                self._random.seen_by(recording),
                torch.autograd.set_multithreading_enabled(False),
                recording.recording(),
            ):
                result = body(call)
        finally:
            self._recording = None
        recording.end(tensors_in(result))
        tape = recording.tape
        if not all(
            isinstance(each, Made) and each.number >= tape.num_given for each in tape.results
        ):
            tape.refuse("it gives a tensor that it did not make")
        if versions != list(map(version_of, given)):
            tape.refuse("it writes to its arguments")
        if len(self._passes) > 1:
            tape.refuse("it has several backward passes")
        self.tapes.append(
            BodyTape(
                tape,
                sum(self._random.draws) - draws_before,
                bool(self._passes),
                any(self._passes),
            )
        )
        return result

    def _alike(self, given: Sequence[torch.Tensor]) -> BodyTape | None:
        """Returns what was taken down of a microbatch that is taken to do what this one does."""
        for each in dict.fromkeys(self.tapes) if self._are_alike else ():
            if is_answered(each.tape, given, self._random, self._devices):
                return each
        return None

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """See ``Bodies``."""
        recording = self._recording
        if recording is None:
            yield
            return
        self._passes.append(recording.is_inside)
        self._state = None
        with code_of_others_seen() as self._seen:
            yield
        if self._seen:
            self.refuse(f"code of {', '.join(sorted(self._seen))} runs in a backward pass")

    def refuse(self, why: str) -> None:
        """See ``Bodies``."""
        if self._recording is not None:  # others may differentiate when this rank is done
            self._recording.tape.refuse(why)

    def _recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a checkpointed function that may change no state when it is called again."""

        def recompute(*args: Any, **kwargs: Any) -> Any:
            with past_function_modes():
                state = self._state = self._state or self._snapshot()
            try:
                return function(*args, **kwargs)
            finally:
                with past_function_modes():
                    has_changed = bool(state.note_changes())
                if has_changed and self._recording is not None:
                    # A graph does not run that Python.
                    self.refuse("a module keeps state, and is computed again")

        # Also what looks at the state runs code of others.
        return not_counted(recompute, lambda: self._seen)

    def _snapshot(self) -> Snapshot:
        parameters = (each for module in self._modules for each in module.parameters(recurse=False))
        moved = {id(each) for each in parameters if type(each) is not nn.Parameter}
        return Snapshot(self._modules, moved=moved)
