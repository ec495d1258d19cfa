"""Mini-batches whose passes are taken down on tapes, or computed from them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.execute.passes import (
    Computation,
    Inputs,
    Outgoing,
    Passes,
)
from smdistributed.modelparallel.torch.execute.starts import Scale
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.tape.confirming import Confirming
from smdistributed.modelparallel.torch.tape.recording import Recording
from smdistributed.modelparallel.torch.tape.running import Keyed, run
from smdistributed.modelparallel.torch.tape.tape import Earlier, Tape
from smdistributed.modelparallel.torch.trial.turns import code_of_others_seen

#: The tapes of forward passes, by segment and microbatch.
Tapes = Mapping[tuple[int, int], Tape]


class Draws(Keyed, Protocol):
    """The random numbers of a step.

    Attributes:
        draws: how many there were in each pass.
    """

    draws: list[int]

    def seen_by(self, between: Recording | Confirming) -> contextlib.AbstractContextManager[None]:
        """Inside, draws go by who stands between Python and torch."""


def not_counted(function: Callable[..., Any], seen: Callable[[], set[str]]) -> Callable[..., Any]:
    """Returns a checkpointed function whose own code does not count in backward passes.

    Args:
        function: that is called again in them.
        seen: gives whose code the one in progress has run.
    """

    def recompute(*args: Any, **kwargs: Any) -> Any:
        before = set(seen())
        try:
            return function(*args, **kwargs)
        finally:
            seen().intersection_update(before)

    return recompute


class TapedComputation(Computation):
    """Computes a mini-batch as it is, and takes its forward passes down.

    Args:
        passes: of its kind.
        inputs: of its microbatches.
        root_scales: for each microbatch, the gradient that its losses start with.
        random: of the step.
        fakes: of what compiled modules are given.
        are_alike: the microbatches look alike: what the first one does is taken for what all do. A
            pass that does something else is found out when its Python is to confirm the tape.
    """

    def __init__(
        self,
        passes: Passes,
        inputs: Inputs,
        root_scales: Sequence[Scale],
        random: Draws,
        fakes: FakeTensorMode,
        *,
        are_alike: bool,
    ) -> None:
        super().__init__(passes, inputs, root_scales)
        self._are_alike = are_alike
        self._fakes = fakes
        self._random = random
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._tapes: dict[tuple[int, int], Tape] = {}
        #: Whose code the backward pass in progress has run.
        self._seen: set[str] = set()

    @property
    def tapes(self) -> Tapes:
        """Those of the passes that were computed."""
        return self._tapes

    def end_forwards(self, position: int) -> None:
        """See ``Computation``."""
        super().end_forwards(position)
        over = self._passes.itinerary.last_forwards[position]
        for (_, microbatch), each in self._recordings.items():
            if microbatch in over:
                each.forget()

    def act(self, position: int, arrived: Outgoing) -> Outgoing:
        """See ``Computation``."""
        action = self._passes.itinerary.actions[position]
        if action.kind is Kind.FORWARD or self._has_tape_of_first(action):
            return super().act(position, arrived)
        # In this thread, where the profiler is.
        with torch.autograd.set_multithreading_enabled(False), code_of_others_seen() as seen:
            self._seen = seen
            outgoing = super().act(position, arrived)
        if seen:
            self._tapes[action.segment, action.microbatch].refuse(
                f"code of {', '.join(sorted(seen))} runs in a backward pass"
            )
        return outgoing

    def _recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return not_counted(function, lambda: self._seen)

    def _has_tape_of_first(self, action: Action) -> bool:
        return self._are_alike and action.microbatch > 0 and (action.segment, 0) in self._tapes

    def run(self, action: Action, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See ``Computation``."""
        m = action.microbatch
        if self._has_tape_of_first(action):
            self._tapes[action.segment, m] = self._tapes[action.segment, 0]
            return super().run(action, arguments)
        earlier = [each for (_, of), each in self._recordings.items() if of == m]
        recording = Recording(
            self._passes.device,
            self._passes.devices,
            [*self._inputs[m], *arguments],
            earlier,
            self._recomputed,
            self._fakes,
        )
        self._recordings[action.segment, m] = recording
        with self._random.seen_by(recording), recording.recording():
            results = super().run(action, arguments)
        recording.end(results)
        nodes = self._plans[m].segments[action.segment].nodes
        if recording.tape.has_regions and any(each.stateful for each in nodes):
            # Its Python runs again in backward passes, and a graph does not run it.
            recording.tape.refuse("a module keeps state, and is computed again")
        # Of one that is refused nothing is left but the reason.
        self._tapes[action.segment, m] = recording.tape
        return results


class ComputationOfTapes(Computation):
    """Computes a mini-batch from the tapes of its forward passes, without their Python.

    Args:
        passes: of its kind.
        inputs: of its microbatches.
        root_scales: for each microbatch, the gradient that its losses start with.
        tapes: of the passes.
        random: of the step.
        runs: compile what lies between products of theirs.
    """

    def __init__(
        self,
        passes: Passes,
        inputs: Inputs,
        root_scales: Sequence[Scale],
        tapes: Tapes,
        random: Keyed,
        runs: TapedRuns,
    ) -> None:
        super().__init__(passes, inputs, root_scales)
        self._tapes = tapes
        different = set(tapes.values())
        self._computed = {each: runs.of(each) for each in different}
        self._random = random
        #: Of microbatch, tape and number.
        self._kept: dict[tuple[int, int, int], torch.Tensor] = {}

    def run(self, action: Action, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See ``Computation``."""
        m = action.microbatch
        tape = self._tapes[action.segment, m]
        given = [*self._inputs[m], *arguments]
        earlier = functools.partial(self._earlier, m)
        computed = self._computed[tape]
        results, kept = run(computed, given, earlier, self._random, self._passes.devices)
        self._kept |= {(m, id(tape), number): tensor for number, tensor in kept.items()}
        found: tuple[torch.Tensor, ...] = results
        return found

    def _earlier(self, microbatch: int, reference: Earlier) -> torch.Tensor:
        return self._kept[microbatch, id(reference.tape), reference.number]
